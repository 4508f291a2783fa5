"""One watch of each unit's control service: what its supervisor says of its pools.

A thread for each unit follows the stream and keeps the newest answer. A stream that breaks, or says
nothing for a whole window, makes the fleet unknown until the next answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice

from baton.control_client import NOTHING_SEEN, ControlClient, seen_by_clients
from baton.errors import BatonError, DeadlineError
from baton.v1 import control_pb2
from deploy.controller.kit.objects import Key
from deploy.controller.observed import (
    NOTHING_HEARD,
    Fleet,
    FleetPool,
    Heard,
    Place,
    PlaceState,
)

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_SETTLED_AFTER_S = 15.0
"""At the least, for a supervisor that does not tell whether it settles: workers register again
within seconds, and one that hangs is fenced in 10."""
_WINDOW_S = 10.0
_STATES = {
    control_pb2.WORKER_STATE_STARTING: PlaceState.STARTING,
    control_pb2.WORKER_STATE_LIVE: PlaceState.LIVE,
    control_pb2.WORKER_STATE_SUSPECT: PlaceState.SUSPECT,
    control_pb2.WORKER_STATE_DRAINING: PlaceState.DRAINING,
}


def fleet_of(told: control_pb2.WatchFleetResponse) -> Fleet:
    """What the supervisor says, as places of pools."""
    pools, seen = {}, seen_by_clients(told.routers)
    for pool in told.pools:
        workers = [w for w in told.workers if w.info.pool == pool.name and w.state in _STATES]
        places = {worker.info.ref.worker_id: _place(worker) for worker in workers}
        starting = {place.worker_id: place.pod_name for place in pool.places}
        wanted = dict.fromkeys(_to_come(pool), "")
        for worker_id, pod in sorted((wanted | starting).items()):
            state = PlaceState.STARTING if pod else PlaceState.PENDING
            places.setdefault(worker_id, Place(worker_id, pod, state))
        pools[pool.name] = FleetPool(
            pool.desired_replicas,
            tuple(places.values()),
            pool.last_error,
            (pool.role_plan.prefill, pool.role_plan.decode),
            seen.get(pool.name, NOTHING_SEEN),
        )
    return Fleet(pools, any(router.num_held for router in told.routers))


def _to_come(pool: control_pb2.PoolStatus) -> list[str]:
    """The places of its size that the supervisor may not have opened yet."""
    staying = {place.worker_id for place in pool.places if place.HasField("standing")}
    numbered = (f"{pool.name}-{index}" for index in count())
    free = (worker_id for worker_id in numbered if worker_id not in staying)
    return list(islice(free, max(0, pool.desired_replicas - len(staying))))


def _place(worker: control_pb2.FleetWorker) -> Place:
    load = worker.load
    num_taken = load.num_blocks - load.num_free_blocks
    return Place(
        worker_id=worker.info.ref.worker_id,
        pod=worker.info.pod_name,
        state=_STATES[worker.state],
        num_running=load.num_running + load.num_reserved,
        num_waiting=load.num_waiting,
        kv_use=num_taken / load.num_blocks if load.num_blocks else 0.0,
    )


def merged(heard: Mapping[str, Heard]) -> Heard:
    """What a cluster's units have said, the oldest first, as one fleet. Workers of the second unit
    are called `<unit>/<worker>`."""
    if len(heard) == 1:
        return next(iter(heard.values()))
    spoken = {code: each for code, each in heard.items() if each.told is not None}
    if not spoken:
        return Heard(is_certain=not heard or any(each.is_certain for each in heard.values()))
    told, at_s = control_pb2.WatchFleetResponse(), 0.0
    for code, each in spoken.items():
        assert each.told is not None
        _add(told, each.told[0], "" if code == next(iter(heard)) else f"{code}/")
        at_s = max(at_s, each.told[1])
    is_settled = all(each.is_settled for each in spoken.values())
    return Heard(fleet_of(told), (told, at_s), is_settled, is_certain=True)


def _add(
    told: control_pb2.WatchFleetResponse, more: control_pb2.WatchFleetResponse, prefix: str
) -> None:
    added = control_pb2.WatchFleetResponse()
    added.CopyFrom(more)
    for worker in added.workers:
        worker.info.ref.worker_id = f"{prefix}{worker.info.ref.worker_id}"
    pools = {pool.name: pool for pool in told.pools}
    for pool in added.pools:
        for place in pool.places:
            place.worker_id = f"{prefix}{place.worker_id}"
        if (known := pools.get(pool.name)) is None:
            told.pools.append(pool)
            continue
        known.desired_replicas += pool.desired_replicas
        known.live_replicas += pool.live_replicas
        known.pending_replicas += pool.pending_replicas
        known.num_failed_starts = max(known.num_failed_starts, pool.num_failed_starts)
        known.last_error = known.last_error or pool.last_error
        known.places.extend(pool.places)
    told.workers.extend(added.workers)
    told.routers.extend(added.routers)
    told.silent_routers.extend(added.silent_routers)
    told.settles |= added.settles


@dataclass
class _Followed:
    """One unit's stream."""

    address: str
    thread: threading.Thread
    stopping: threading.Event
    client: ControlClient
    heard: Heard = NOTHING_HEARD
    known_since_s: float = 0.0
    """Since when it has spoken without a break."""


class FleetWatch:
    """Own the watches. `on_change` gets the cluster's key whenever what is known of it changed, on
    the watch's thread."""

    def __init__(
        self, on_change: Callable[[Key], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_change, self._clock = on_change, clock
        self._lock = threading.Lock()
        self._followed: dict[Key, dict[str, _Followed]] = {}

    def follow(self, cluster: Key, addresses: Mapping[str, str]) -> None:
        """The control services of its units, by code, and no others."""
        with self._lock:
            known = dict(self._followed.get(cluster, {}))
        for unit in known.keys() - addresses.keys():
            self._end(cluster, unit)
        for unit in addresses.keys() - known.keys():
            self._begin(cluster, unit, addresses[unit])

    def _begin(self, cluster: Key, unit: str, address: str) -> None:
        stopping = threading.Event()
        client = ControlClient(address)
        followed = _Followed(
            address,
            threading.Thread(
                target=lambda: self._run(cluster, followed),
                name=f"fleet-{cluster}-{unit}",
                daemon=True,
            ),
            stopping,
            client,
        )
        with self._lock:
            self._followed.setdefault(cluster, {})[unit] = followed
        followed.thread.start()

    def forget(self, cluster: Key) -> None:
        """End a cluster's watches, if there are any."""
        self.follow(cluster, {})
        with self._lock:
            self._followed.pop(cluster, None)

    def _end(self, cluster: Key, unit: str) -> None:
        with self._lock:
            followed = self._followed.get(cluster, {}).pop(unit, None)
        if followed is not None:
            followed.stopping.set()
            followed.client.close()

    def heard(self, cluster: Key, unit: str) -> Heard:
        with self._lock:
            followed = self._followed.get(cluster, {}).get(unit)
        if followed is None:
            return NOTHING_HEARD
        heard, spoken_s = followed.heard, self._clock() - followed.known_since_s
        if heard.told is None or heard.settles:
            return heard
        return replace(heard, is_settled=spoken_s >= _SETTLED_AFTER_S)

    def client(self, cluster: Key, unit: str) -> ControlClient | None:
        with self._lock:
            followed = self._followed.get(cluster, {}).get(unit)
            return None if followed is None else followed.client

    def stop(self) -> None:
        for cluster in list(self._followed):
            self.forget(cluster)

    def _run(self, cluster: Key, followed: _Followed) -> None:
        while not followed.stopping.is_set():
            if not self._follow(cluster, followed):
                self._know(cluster, followed, Heard(is_certain=True))
                followed.stopping.wait(_RETRY_S)

    def _follow(self, cluster: Key, followed: _Followed) -> bool:
        """One window of the stream; whether the supervisor still speaks at its end."""
        speaks = False
        try:
            for told in followed.client.watch_fleet(_WINDOW_S):
                newest = (told, self._clock())
                self._know(cluster, followed, Heard(fleet_of(told), newest, is_certain=True))
                speaks = True
        except DeadlineError:
            return speaks
        except BatonError as error:
            if followed.heard.fleet is not None:
                log.warning("%s: the supervisor is lost: %s", cluster, error)
        except ValueError:  # gRPC's word for a channel that was closed
            if not followed.stopping.is_set():
                raise
        return False

    def _know(self, cluster: Key, followed: _Followed, heard: Heard) -> None:
        before = followed.heard
        if before.fleet is None:
            followed.known_since_s = self._clock()
        followed.heard = heard
        if _decisive(before) != _decisive(heard) and not followed.stopping.is_set():
            self._on_change(cluster)


def _decisive(heard: Heard) -> object:
    """What is acted on; figures change with every answer and can wait for the next look."""
    fleet = heard.fleet
    if fleet is None:
        return heard.is_certain
    pools = {
        name: (
            pool.desired_replicas,
            pool.role_plan,
            pool.last_error,
            [(place.worker_id, place.pod, place.state) for place in pool.places],
        )
        for name, pool in fleet.pools.items()
    }
    return fleet.holds_requests, heard.settles, pools
