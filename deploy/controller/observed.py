"""What the operator sees at one moment: pods by the API server, places by the supervisor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from deploy.controller.manifests.common import POOL_LABEL
from deploy.controller.manifests.pods import CONFIG_HASH
from deploy.controller.objects import Object


class PlaceState(Enum):
    """Of one place of a pool and the worker that fills it, if any does."""

    PENDING = auto()  # no pod has room for it yet
    STARTING = auto()
    LIVE = auto()
    SUSPECT = auto()
    DRAINING = auto()


@dataclass(frozen=True)
class Pod:
    name: str
    pool: str
    is_ready: bool
    is_going: bool
    """Its deletion has begun."""
    config_hash: str
    created_at: str

    @classmethod
    def of(cls, obj: Object) -> Pod:
        metadata, status = obj["metadata"], obj.get("status", {})
        conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
        return cls(
            name=metadata["name"],
            pool=metadata.get("labels", {}).get(POOL_LABEL, ""),
            is_ready=conditions.get("Ready") == "True",
            is_going="deletionTimestamp" in metadata,
            config_hash=metadata.get("annotations", {}).get(CONFIG_HASH, ""),
            created_at=metadata.get("creationTimestamp", ""),
        )


@dataclass(frozen=True)
class Place:
    """One place of a pool, as the supervisor keeps it."""

    worker_id: str
    pod: str
    """Where its worker runs or starts; empty while it has no pod."""
    state: PlaceState
    num_running: int = 0
    num_waiting: int = 0
    kv_use: float = 0.0
    """Share of its KV blocks that are in use."""
    decode_step_s: float = 0.0


@dataclass(frozen=True)
class FleetPool:
    """A pool in the supervisor's eyes."""

    desired_replicas: int
    places: Sequence[Place]
    last_error: str = ""
    role_plan: tuple[int, int] = (0, 0)
    """Workers that act as prefill alone and as decode alone."""


@dataclass(frozen=True)
class Fleet:
    """All pools of a cluster, by their names in it."""

    pools: Mapping[str, FleetPool]
    holds_requests: bool = False
    """Whether routers hold some for pools that are at zero."""
