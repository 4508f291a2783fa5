"""What the operator reports in `.status`: short lists, and numbers as they are now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from baton.config.ranges import Whole, between, sized
from deploy.api.checked import Checked
from deploy.api.serving_cluster import SOURCE

MESSAGE = 32768
"""Most characters of a message."""


@dataclass(frozen=True)
class Reported(Checked):
    """Base of what the operator alone writes, and always whole: its schema has no defaults."""


@dataclass(frozen=True)
class Condition(Reported):
    """A condition, as all of Kubernetes' objects have them."""

    type: Annotated[str, sized(316)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, sized(1024, r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    message: Annotated[str, sized(MESSAGE)]
    last_transition_time: Annotated[str, sized(64)]
    observed_generation: Whole = 0


@dataclass(frozen=True)
class Draining(Reported):
    """A worker that drains, and what it still waits for."""

    worker: Annotated[str, sized(253)]
    pod: Annotated[str, sized(253)] = ""
    num_running: Whole = 0
    """Requests that the worker still runs."""
    since: Annotated[str, sized(64)] = ""
    held_by: Annotated[str, sized(1024)] = ""
    """What holds up a drain that exceeds the pool's drainTimeout."""


class State(StrEnum):
    MAKING = "Making"
    SERVING = "Serving"
    GROWING = "Growing"
    SHIFTING = "Shifting"
    PAUSED = "Paused"
    RETIRING = "Retiring"
    STRANDED = "Stranded"
    REVERTING = "Reverting"
    REVERTED = "Reverted"
    REPLACED = "Replaced"
    DRAINING = "Draining"
    ENDING = "Ending"


@dataclass(frozen=True)
class RolloutStatus(Reported):
    """How far the rollout of the spec's unit is."""

    state: State
    """Making: there is no unit yet. Serving: the unit is what the spec asks for. Growing: the
    coming unit gets workers. Shifting: it has its share of the requests and is watched. Retiring:
    it has all requests; the former unit runs its last streams, and stays until the coming one can
    be judged. Stranded: the coming unit has lost its workers since the former has begun to go.
    Reverting, Reverted: it goes back, it went back. Replaced: the spec asks for another unit.
    Draining, Ending: the only unit makes way (Recreate)."""
    reason: Annotated[str, sized(4096)] = ""
    units: Mapping[str, str] = field(default_factory=dict)
    """Each unit's share of the requests and live workers, by its code, while there are two."""
    shares: Mapping[str, int] = field(default_factory=dict)
    """Each unit's share of the requests alone, in percent."""


@dataclass(frozen=True)
class WorkerPoolStatus(Reported):
    replicas: Whole = 0
    """Workers, including those that start or drain."""
    ready_replicas: Whole = 0
    draining: Annotated[tuple[Draining, ...], sized(1024)] = ()
    draining_replicas: Whole = 0
    """How many workers drain."""
    selector: Annotated[str, sized(1024)] = ""
    """Labels of the pool's pods, for HorizontalPodAutoscalers."""
    queue: Whole = 0
    """Requests that wait at the pool's workers."""
    kv_use_percent: Annotated[int, between(0, 100)] = 0
    ttft_seconds: float | None = None
    """Time from arrival to first token, as clients saw it: the 95th percentile of the pool's
    prompts of the last minute."""
    ttft_target_seconds: float | None = None
    """The target for it: `spec.planner.ttftTargetSeconds` of the ServingCluster, if the pool
    prefills."""
    itl_seconds: float | None = None
    """Time between two tokens of the pool's streams, as clients saw it: the 95th percentile of the
    last minute."""
    itl_target_seconds: float | None = None
    """The target for it: `spec.planner.itlTargetSeconds`, if the pool decodes."""
    last_error: Annotated[str, sized(MESSAGE)] = ""
    """Why a replica last failed to start, in its own words."""
    desired_replicas: int | None = None
    """The size that the planner would choose, whoever writes `spec.replicas`."""
    desired_reason: Annotated[str, sized(4096)] = ""
    observed_generation: Whole = 0
    conditions: Annotated[tuple[Condition, ...], sized(16)] = ()


@dataclass(frozen=True)
class ServingClusterStatus(Reported):
    model: Annotated[str, sized(SOURCE)] = ""
    """What clients call the model. Set when it is first available; another model without a
    `servedModelName` keeps it."""
    endpoints: Mapping[str, str] = field(default_factory=dict)
    """`grpc` and `openai`: the routers inside the cluster, grpcs:// and https:// where they serve
    TLS. `external`, and externalOpenai: `spec.router.hostname` and `httpHostname`, at the port of
    the Gateway or Ingress. `control`: the supervisor."""
    unit: Annotated[str, sized(64)] = ""
    """The unit's code. Its RayCluster is called `<cluster>-<code>`, its pods carry the label
    baton.dev/unit."""
    rollout: RolloutStatus | None = None
    pools: Mapping[str, str] = field(default_factory=dict)
    """Ready and wanted replicas of each pool, such as `2/3`."""
    observed_generation: Whole = 0
    conditions: Annotated[tuple[Condition, ...], sized(16)] = ()
