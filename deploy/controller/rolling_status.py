"""What is decided of rollouts, as statuses hold it: written, and read back after an operator's
restart. Pure. What is not said is None, which a merge patch takes away.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from deploy.controller.cohort_rollout import Phase, Progress
from deploy.controller.manifests.common import Object
from deploy.controller.objects import Object as Seen
from deploy.controller.rollout import ReadyWatch, Room

_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def timestamp(moment: datetime.datetime) -> str:
    """As Kubernetes writes one; whole seconds."""
    return moment.astimezone(datetime.UTC).strftime(_FORMAT)


def progress_in(cluster: Seen) -> Progress | None:
    """Of a ServingCluster; None: nobody has told."""
    told = cluster.get("status", {}).get("cohort")
    if not told:
        return None
    return Progress(
        serving=told["serving"],
        next=told.get("next") or "",
        phase=Phase(told.get("phase", Phase.SERVING)),
        weight=told.get("weight", 0),
        since=_moment(told.get("since")),
        reason=told.get("reason") or "",
        is_fault=told.get("isFault", False),
        tried=tuple(told.get("tried") or ()),
    )


def progress_status(progress: Progress) -> Object:
    return {
        "serving": progress.serving,
        "next": progress.next or None,
        "phase": progress.phase.value,
        "weight": progress.weight,
        "since": None if progress.since is None else timestamp(progress.since),
        "reason": progress.reason or None,
        "isFault": progress.is_fault,
        "tried": list(progress.tried) or None,
    }


def watch_in(pool: Seen) -> ReadyWatch | None:
    """Of a WorkerPool."""
    told = pool.get("status", {}).get("rollout")
    if not told:
        return None
    since = _moment(told.get("waitingSince"))
    surge, unavailable = told.get("maxSurge"), told.get("maxUnavailable")
    is_noted = surge is not None and unavailable is not None
    room = Room(surge, unavailable) if is_noted else None
    num_live, instead = told.get("readyReplicas", 0), told.get("instead") or ""
    is_late = told.get("isLate", False)
    has_served = told.get("hasServed", not instead)  # an operator that did not note it
    return ReadyWatch(told["revision"], num_live, since, room, instead, is_late, has_served)


def watch_status(watch: ReadyWatch) -> Object:
    since = None if watch.waiting_since is None else timestamp(watch.waiting_since)
    return {
        "revision": watch.revision,
        "readyReplicas": watch.num_live,
        "waitingSince": since,
        "isLate": watch.is_late,
        "instead": watch.instead or None,
        "hasServed": watch.has_served,
        "maxSurge": None if watch.room is None else watch.room.max_surge,
        "maxUnavailable": None if watch.room is None else watch.room.max_unavailable,
    }


def watches_in(pools: Mapping[str, Seen]) -> dict[str, ReadyWatch]:
    """Of WorkerPools by name."""
    found = {name: watch_in(pool) for name, pool in pools.items()}
    return {name: watch for name, watch in found.items() if watch is not None}


def _moment(text: str | None) -> datetime.datetime | None:
    """None: no such time."""
    if not text:
        return None
    return datetime.datetime.strptime(text, _FORMAT).replace(tzinfo=datetime.UTC)
