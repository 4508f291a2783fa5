"""What the operator sees at one moment: pods by the API server, places by the supervisor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from baton.seen_by_clients import NOTHING_SEEN, SeenByClients
from deploy.controller.manifests.common import POOL_LABEL
from deploy.controller.manifests.pods import REVISION_LABEL
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
    revision: str
    """By its name; a pool of its own to the supervisor."""
    created_at: str

    @classmethod
    def of(cls, obj: Object) -> Pod:
        metadata, status = obj["metadata"], obj.get("status", {})
        labels = metadata.get("labels", {})
        conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
        return cls(
            name=metadata["name"],
            pool=labels.get(POOL_LABEL, ""),
            is_ready=conditions.get("Ready") == "True",
            is_going="deletionTimestamp" in metadata,
            revision=labels.get(REVISION_LABEL, ""),
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

    @property
    def index(self) -> int:
        """Among its pool's places, from 0."""
        return int(self.worker_id.rpartition("-")[2])


@dataclass(frozen=True)
class FleetPool:
    """A pool in the supervisor's eyes: one revision of a WorkerPool."""

    desired_replicas: int
    places: Sequence[Place]
    last_error: str = ""
    role_plan: tuple[int, int] = (0, 0)
    """Workers that act as prefill alone and as decode alone."""
    cohort: str = ""
    cohort_weight: int = 0
    """Of new requests; the cohort's share is this by the sum over all."""
    seen: SeenByClients = NOTHING_SEEN


@dataclass(frozen=True)
class Fleet:
    """All pools that the supervisor knows, by the names of their revisions."""

    pools: Mapping[str, FleetPool]
    holds_requests: bool = False
    """Whether routers hold some for pools that are at zero."""
