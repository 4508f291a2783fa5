"""What the operator tells in `.status`; every list is short, every number of the moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from deploy.api.checked import Checked, bounded
from deploy.api.model_source import SOURCE

MESSAGE = 32768
"""Characters of what is told in words, at most."""


@dataclass(frozen=True)
class Condition(Checked):
    """As in all of Kubernetes' objects."""

    type: str = bounded(max_size=316)
    status: Literal["True", "False", "Unknown"] = bounded()
    reason: str = bounded(max_size=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    message: str = bounded(max_size=MESSAGE)
    last_transition_time: str = bounded(max_size=64)
    observed_generation: int = bounded(0, minimum=0)


@dataclass(frozen=True)
class Draining(Checked):
    """A worker that leaves, and what it still waits for."""

    worker: str = bounded(max_size=253)
    pod: str = bounded("", max_size=253)
    num_running: int = bounded(0, minimum=0)
    """Requests that it still runs."""
    since: str = bounded("", max_size=64)
    held_by: str = bounded("", max_size=1024)
    """What holds it up, where it takes longer than the pool's drainTimeout."""


@dataclass(frozen=True)
class PoolRevision(Checked):
    """One version of a pool."""

    name: str = bounded(max_size=63)
    """As pods carry it in the label baton.dev/revision."""
    cohort: str = bounded("", max_size=63)
    """Versions of other weights, quantisation or block size are of another cohort."""
    replicas: int = bounded(0, minimum=0)
    ready_replicas: int = bounded(0, minimum=0)


@dataclass(frozen=True)
class PoolRollout(Checked):
    """How long the newest version has kept others waiting; what an operator goes on from."""

    revision: str = bounded(max_size=63)
    ready_replicas: int = bounded(0, minimum=0)
    """Most that were ready at once."""
    waiting_since: str = bounded("", max_size=64)
    """Since when workers that were asked for have been missing or, once it is late, since when none
    has. Empty: neither, or the supervisor is silent."""
    is_late: bool = False
    """Workers of it that were asked for have been missing for `readyTimeout`: a rollout to it has
    stopped."""
    max_surge: int | None = None
    """With which it waited: with another it is tried anew."""
    max_unavailable: int | None = None
    instead: str = bounded("", max_size=63)
    """The version that served before, until this one alone does."""
    has_served: bool = False
    """It alone: it is what served before the next one."""


@dataclass(frozen=True)
class CohortStatus(Checked):
    """How far a change of weights, quantisation or block size is; what an operator goes on from."""

    serving: str = bounded(max_size=63)
    """The cohort that has the requests which the next one has not."""
    next: str = bounded("", max_size=63)
    phase: Literal["Serving", "Growing", "Watching", "Returning", "Returned"] = "Serving"
    weight: int = bounded(0, minimum=0, maximum=100)
    """Percent of new requests that go to the next one."""
    since: str = bounded("", max_size=64)
    """When this share began to be watched."""
    reason: str = bounded("", max_size=4096)
    """Why it is taken back."""
    is_fault: bool = False
    """The next one served worse than `spec.rollout` allows."""
    tried: tuple[str, ...] = bounded((), max_size=64)
    """The pools' versions with which it did: with others it is tried again."""


@dataclass(frozen=True)
class WorkerPoolStatus(Checked):
    replicas: int = bounded(0, minimum=0)
    """Workers that there are, those that start or drain included."""
    ready_replicas: int = bounded(0, minimum=0)
    updated_replicas: int = bounded(0, minimum=0)
    """Workers of the newest version that are ready."""
    revisions: tuple[PoolRevision, ...] = bounded((), max_size=64)
    rollout: PoolRollout | None = None
    draining: tuple[Draining, ...] = bounded((), max_size=1024)
    draining_replicas: int = bounded(0, minimum=0)
    """How many those are."""
    selector: str = bounded("", max_size=1024)
    """Labels of the pool's pods, for HorizontalPodAutoscalers."""
    queue: int = bounded(0, minimum=0)
    """Requests that wait at the pool's workers."""
    kv_use_percent: int = bounded(0, minimum=0, maximum=100)
    ttft_seconds: float | None = None
    """From arrival to first token, of prompts that the pool prefilled in the last minute: the 95th
    percentile of what clients saw."""
    ttft_target_seconds: float | None = None
    """`spec.planner.ttftTargetS` of the ServingCluster, where the pool prefills."""
    itl_seconds: float | None = None
    """Between two tokens of the streams that the pool decodes, likewise."""
    itl_target_seconds: float | None = None
    """`spec.planner.itlTargetS`, where the pool decodes."""
    last_error: str = bounded("", max_size=MESSAGE)
    """Why a replica last failed to start, in its own words."""
    desired_replicas: int | None = None
    """What the planner would have, whoever writes `spec.replicas`."""
    desired_reason: str = bounded("", max_size=4096)
    observed_generation: int = bounded(0, minimum=0)
    conditions: tuple[Condition, ...] = bounded((), max_size=16)


@dataclass(frozen=True)
class ServingClusterStatus(Checked):
    model: str = bounded("", max_size=SOURCE)
    """What clients call it."""
    served_model_name: str = bounded("", max_size=SOURCE)
    """What they called it when it was last available: it stays that where the spec gives no
    `servedModelName`, whatever the model is then."""
    endpoints: Mapping[str, str] = field(default_factory=dict)
    """Where what is served: `grpc` (grpcs:// before it: by TLS alone), `control`, and `external`,
    the name of `spec.router.hostname`, at the port of the Gateway or Ingress."""
    revision: str = bounded("", max_size=64)
    """What the spec asks for of weights, quantisation and block size, which pools must share to
    exchange KV: a cohort."""
    cohort: CohortStatus | None = None
    pools: Mapping[str, str] = field(default_factory=dict)
    """Ready and wanted replicas of each pool, as `2/3`."""
    observed_generation: int = bounded(0, minimum=0)
    conditions: tuple[Condition, ...] = bounded((), max_size=16)
