"""The settings of the registry, of worker processes, of the decode role and of the supervisor.

Standard library only: `baton.config.cluster` composes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.config.ranges import Count, NotNegative, Port, Positive, Ranged, Whole, at_least

POD_LABEL = "baton.dev/pod"
"""The label of a Ray node that holds the name of its pod."""
PORT_VARIABLE = "BATON_WORKER_PORT"
"""In a pod's environment: where its worker listens. It overrides the settings."""


def pod_resource(pool: str) -> str:
    """The resource that a pool's pods offer Ray: a unit for each rank of a replica."""
    return f"baton-pool/{pool}"


@dataclass(frozen=True)
class RegistryConfig(Ranged):
    """When the registry calls a worker SUSPECT or GONE. All times are in seconds."""

    silent_after_s: Positive = 3.0
    """A worker not heard of for this long gets nothing new: SUSPECT."""
    stuck_after_s: Positive = 3.0
    """A step may always take this long, even if a shorter one was predicted."""
    stuck_factor: Annotated[float, at_least(1)] = 20.0
    """A step that takes this many times its prediction is stuck: SUSPECT."""
    first_step_s: Positive = 120.0
    """How long a step that nothing predicts may take: a worker's first with a prompt, its first
    that decodes, and one with prompts over four times as long as any before."""
    gone_after_s: Positive = 15.0
    """A worker not heard of for this long is GONE; longer than `silent_after_s`."""
    forget_after_s: NotNegative = 10.0
    """How long a worker that is GONE is still shown."""
    register_within_s: Positive = 10.0
    """A call to register whose first message has not come by then is ended."""

    @property
    def look_s(self) -> float:
        """How often the registry looks for silent workers. If it misses more than two looks
        (stopped, starved), that time counts as nobody's silence."""
        return self.silent_after_s / 6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gone_after_s <= self.silent_after_s:
            raise ValueError(
                f"gone_after_s must be above silent_after_s ({self.silent_after_s}), "
                f"not {self.gone_after_s}"
            )


@dataclass(frozen=True)
class WorkerSettings(Ranged):
    """Settings of every worker process in all pools."""

    heartbeat_s: Positive = 0.3
    """How often a worker reports to the registry."""
    drain_timeout_s: NotNegative = 30.0
    """How long a drain waits for what runs. Then the rest continues on other workers."""
    leave_timeout_s: Positive = 10.0
    """How long a worker that leaves waits for the engine's step under way."""
    port: Port = 0
    """Where a worker's links listen. 0: any free port, which it registers."""
    metrics_port: Port | None = 0
    """Prometheus metrics over HTTP; None: not served, 0: any free port."""
    metrics_host: str | None = None
    """None: where its other services listen, which is the loopback on one machine and the pod's
    address in a pod."""
    health_port: Port | None = None
    """For probes, over HTTP and open to all: `GET /live` answers 200 while the worker serves, and
    503 once it drains. It tells nothing else. None: not served, 0: any free port."""


@dataclass(frozen=True)
class SupervisorConfig(Ranged):
    """How long replicas may take before they are killed. All times are in seconds."""

    fence_after_s: Positive = 10.0
    """A worker that has been SUSPECT for this long is killed and recreated. A restarted supervisor
    also kills one that it finds serving and that does not register again by then."""
    start_timeout_s: Positive = 600.0
    """A replica that has not registered by then is killed and recreated; `baton up` gives up when
    its pools are not live by then."""
    drain_timeout_s: Positive = 60.0
    """A leaving replica that has not ended by then is killed. Must exceed the worker's own drain
    timeout."""


@dataclass(frozen=True)
class DecodeConfig(Ranged):
    """How long a decode worker waits, and how long it keeps output that nobody asks for. All times
    are in seconds."""

    orphan_ttl_s: NotNegative = 30.0
    """How long a request runs on, or its output is kept, after its router is gone."""
    finished_ttl_s: NotNegative = 30.0
    """How long an ended request is remembered."""
    max_finished: Count = 4096
    """Ended requests remembered at most, and as many attempts that ended without output."""
    max_finished_bytes: Whole = 256 << 20
    """The same in bytes of their prompts and outputs."""
    reserve_within_s: Positive = 2.0
    """How long an engine may take to reserve blocks. One that has no room by then is full, and the
    router tries another worker. Below the routers' `reserve_timeout_s`."""
    no_capacity_retry_s: NotNegative = 0.1
    """When a router that met a full worker is to come back."""
    max_lease_s: Positive = 600.0
    """Longest life of a lease for a request without a deadline."""
