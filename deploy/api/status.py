"""What the operator tells in `.status`; every list is short, every number of the moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from deploy.api.checked import Checked, bounded
from deploy.api.serving_cluster import SOURCE

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
class RolloutStatus(Checked):
    """How far the unit is that the spec asks for, by `spec.rollout.strategy`."""

    state: Literal[
        "Making", "Serving", "Growing", "Shifting", "Paused", "Retiring", "Reverting", "Reverted",
        "Replaced", "Draining", "Ending",
    ] = bounded()  # fmt: skip
    """Serving: the unit is what the spec asks for. Growing: the coming unit gets workers. Shifting:
    it has its share of the requests and is watched. Retiring: it has all of them, the former unit
    runs its last streams. Reverting, Reverted: it went back. Replaced: the spec asks for another
    one. Draining, Ending: the only unit makes way (Recreate). Making: there is none yet."""
    reason: str = bounded("", max_size=4096)
    units: Mapping[str, str] = field(default_factory=dict)
    """By code, while there are two: the share of the requests and the live workers of each."""


@dataclass(frozen=True)
class WorkerPoolStatus(Checked):
    replicas: int = bounded(0, minimum=0)
    """Workers that there are, those that start or drain included."""
    ready_replicas: int = bounded(0, minimum=0)
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
    """`spec.planner.ttftTargetSeconds` of the ServingCluster, where the pool prefills."""
    itl_seconds: float | None = None
    """Between two tokens of the streams that the pool decodes, likewise."""
    itl_target_seconds: float | None = None
    """`spec.planner.itlTargetSeconds`, where the pool decodes."""
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
    """What clients call the model, since it was first available. It stays that when the spec names
    another model and no `servedModelName`."""
    endpoints: Mapping[str, str] = field(default_factory=dict)
    """Where what is served: `grpc` (grpcs:// before it: by TLS alone), `control`, and `external`,
    the name of `spec.router.hostname`, at the port of the Gateway or Ingress."""
    unit: str = bounded("", max_size=64)
    """The code of the unit that there is: its RayCluster is called `<cluster>-<code>`, and pods of
    it carry the label baton.dev/unit."""
    rollout: RolloutStatus | None = None
    pools: Mapping[str, str] = field(default_factory=dict)
    """Ready and wanted replicas of each pool, as `2/3`."""
    observed_generation: int = bounded(0, minimum=0)
    conditions: tuple[Condition, ...] = bounded((), max_size=16)
