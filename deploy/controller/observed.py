"""What the operator sees at one moment: pods by the API server, places by the supervisor."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from baton.control_client import NOTHING_SEEN, SeenByClients
from baton.v1 import control_pb2
from deploy.controller.kit.objects import Object
from deploy.controller.manifests.common import COMPONENT_LABEL, POOL_LABEL, UNIT_LABEL
from deploy.controller.status.pod_waits import waits_for

_ENDS_WITHIN = datetime.timedelta(seconds=60)
"""A kubelet that runs has ended a pod so soon after its time is over."""
_LOST = "its time to end is over, and nobody has ended it: is its node lost?"


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
    created_at: str
    waits_for: str = ""
    """Why it does not run; empty: it does, or tells of nothing."""
    component: str = ""
    """What it is of the cluster: head, worker or router."""
    unit: str = ""
    """The code of its unit; a router is of none."""
    is_lost: bool = False
    """It should have ended, and stays: nobody on its node ends it."""

    @classmethod
    def of(cls, obj: Object, now: datetime.datetime) -> Pod:
        metadata, status = obj["metadata"], obj.get("status", {})
        is_lost = _is_lost(metadata, now)
        labels = metadata.get("labels", {})
        conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
        return cls(
            name=metadata["name"],
            pool=labels.get(POOL_LABEL, ""),
            is_ready=conditions.get("Ready") == "True",
            is_going="deletionTimestamp" in metadata,
            created_at=metadata.get("creationTimestamp", ""),
            waits_for=_LOST if is_lost else waits_for(obj),
            component=labels.get(COMPONENT_LABEL, ""),
            unit=labels.get(UNIT_LABEL, ""),
            is_lost=is_lost,
        )


def _is_lost(metadata: Object, now: datetime.datetime) -> bool:
    """The time of a deletion is when the pod's grace ends."""
    if "deletionTimestamp" not in metadata:
        return False
    return now > datetime.datetime.fromisoformat(metadata["deletionTimestamp"]) + _ENDS_WITHIN


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


@dataclass(frozen=True)
class FleetPool:
    """A pool in the supervisor's eyes."""

    desired_replicas: int
    places: Sequence[Place]
    last_error: str = ""
    role_plan: tuple[int, int] = (0, 0)
    """Workers that act as prefill alone and as decode alone."""
    seen: SeenByClients = NOTHING_SEEN

    def of_state(self, state: PlaceState) -> list[Place]:
        return [place for place in self.places if place.state is state]


@dataclass(frozen=True)
class Fleet:
    """All pools that the supervisor knows, by name."""

    pools: Mapping[str, FleetPool]
    holds_requests: bool = False
    """Whether routers hold some for pools that are at zero."""


@dataclass(frozen=True)
class Heard:
    """What a cluster's supervisor has said, at one moment."""

    fleet: Fleet | None = None
    """None while nothing is known: the supervisor is silent or not there yet."""
    told: tuple[control_pb2.WatchFleetResponse, float] | None = None
    """The answer that `fleet` was made of, and when it came: seconds of any one clock."""
    is_settled: bool = False
    """It has spoken for so long that all of its workers have registered: one that has just started
    knows of none."""
    is_certain: bool = False
    """It has spoken, or has been silent when it was asked: who has just begun to listen can tell
    neither."""

    @property
    def settles(self) -> bool:
        """It says itself that workers may have yet to register."""
        return self.told is not None and self.told[0].settles


NOTHING_HEARD = Heard()
