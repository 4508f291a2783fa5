"""The settings of the registry, of worker processes and of the supervisor.

Standard library only: `baton.config.cluster` composes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

POD_LABEL = "baton.dev/pod"
"""The label of a Ray node that holds the name of its pod."""
PORT_VARIABLE = "BATON_WORKER_PORT"
"""In a pod's environment: where its worker listens. It overrides the settings."""


def pod_resource(pool: str) -> str:
    """The resource that a pool's pods offer Ray: a unit for each rank of a replica."""
    return f"baton-pool/{pool}"


@dataclass(frozen=True)
class RegistryConfig:
    """When the registry calls a worker SUSPECT or GONE. All times are in seconds."""

    silent_after_s: float = 3.0
    """A worker not heard of for this long gets nothing new: SUSPECT."""
    stuck_after_s: float = 3.0
    """A step may always take this long, even if a shorter one was predicted."""
    stuck_factor: float = 20.0
    """A step that takes this many times its prediction is stuck: SUSPECT."""
    first_step_s: float = 120.0
    """How long a step that nothing predicts may take: a worker's first with a prompt, its first
    that decodes, and one with prompts over four times as long as any before."""
    gone_after_s: float = 15.0
    """A worker not heard of for this long is GONE; longer than `silent_after_s`."""
    forget_after_s: float = 10.0
    """How long a worker that is GONE is still shown."""
    register_within_s: float = 10.0
    """A call to register whose first message has not come by then is ended."""

    @property
    def look_s(self) -> float:
        """How often the registry looks for silent workers. If it misses more than two looks
        (stopped, starved), that time counts as nobody's silence."""
        return self.silent_after_s / 6

    def __post_init__(self) -> None:
        for name in ("silent_after_s", "stuck_after_s", "first_step_s", "gone_after_s"):
            _check_positive(name, getattr(self, name))
        _check_positive("register_within_s", self.register_within_s)
        if not 1 <= self.stuck_factor < math.inf:
            raise ValueError(f"stuck_factor must be at least 1, not {self.stuck_factor}")
        if self.gone_after_s <= self.silent_after_s:
            raise ValueError(
                f"gone_after_s must be above silent_after_s ({self.silent_after_s}), "
                f"not {self.gone_after_s}"
            )
        _check_not_negative("forget_after_s", self.forget_after_s)


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of every worker process in all pools."""

    heartbeat_s: float = 0.3
    """How often a worker reports to the registry."""
    drain_timeout_s: float = 30.0
    """How long a drain waits for what runs. Then the rest continues on other workers."""
    leave_timeout_s: float = 10.0
    """How long a worker that leaves waits for the engine's step under way."""
    port: int = 0
    """Where a worker's gRPC services listen. 0: any free port, which it registers."""
    metrics_port: int | None = 0
    """Prometheus metrics over HTTP; None: not served, 0: any free port."""

    def __post_init__(self) -> None:
        _check_positive("heartbeat_s", self.heartbeat_s)
        _check_not_negative("drain_timeout_s", self.drain_timeout_s)
        _check_positive("leave_timeout_s", self.leave_timeout_s)
        for name in ("port", "metrics_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ValueError(f"{name} must be between 0 and 65535, not {port}")


@dataclass(frozen=True)
class SupervisorConfig:
    """How long replicas may take before they are killed. All times are in seconds."""

    fence_after_s: float = 10.0
    """A worker that has been SUSPECT for this long is killed and recreated. A restarted supervisor
    also kills one that it finds serving and that does not register again by then."""
    start_timeout_s: float = 600.0
    """A replica that has not registered by then is killed and recreated; `baton up` gives up when
    its pools are not live by then."""
    drain_timeout_s: float = 60.0
    """A leaving replica that has not ended by then is killed. Must exceed the worker's own drain
    timeout."""

    def __post_init__(self) -> None:
        for name in ("fence_after_s", "start_timeout_s", "drain_timeout_s"):
            _check_positive(name, getattr(self, name))


def _check_positive(name: str, value_s: float) -> None:
    if not 0 < value_s < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, not {value_s}")


def _check_not_negative(name: str, value_s: float) -> None:
    if not 0 <= value_s < math.inf:
        raise ValueError(f"{name} must not be negative, and finite, not {value_s}")
