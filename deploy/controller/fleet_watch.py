"""One watch of each cluster's control service: what the supervisor says of its pools.

A thread for each cluster follows the stream and keeps the newest answer; a stream that breaks, or
says nothing for a whole window, makes the fleet unknown until the next one tells.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.control_client import ControlClient
from baton.errors import BatonError, DeadlineError
from baton.seen_by_clients import NOTHING_SEEN, seen_by_clients
from baton.v1 import control_pb2
from deploy.controller.objects import Key
from deploy.controller.observed import Fleet, FleetPool, Place, PlaceState

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_SETTLED_AFTER_S = 15.0  # workers register again within seconds; one that hangs is fenced in 10
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
        wanted = {f"{pool.name}-{index}": "" for index in range(pool.desired_replicas)}
        for worker_id, pod in sorted((wanted | starting).items()):
            state = PlaceState.STARTING if pod else PlaceState.PENDING
            places.setdefault(worker_id, Place(worker_id, pod, state))
        pools[pool.name] = FleetPool(
            pool.desired_replicas,
            tuple(places.values()),
            pool.last_error,
            (pool.role_plan.prefill, pool.role_plan.decode),
            pool.cohort,
            pool.cohort_weight,
            seen.get(pool.name, NOTHING_SEEN),
        )
    return Fleet(pools, any(router.num_held for router in told.routers))


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


@dataclass
class _Followed:
    """One cluster's stream."""

    address: str
    thread: threading.Thread
    stopping: threading.Event
    client: ControlClient
    fleet: Fleet | None = None
    told: control_pb2.WatchFleetResponse | None = None
    """What `fleet` was made of."""
    heard_at_s: float = 0.0
    known_since_s: float = 0.0
    """Since when it has spoken without a break."""


class FleetWatch:
    """Own the watches. `on_change` is told the cluster's key whenever what is known of it changed,
    on the watch's thread."""

    def __init__(self, on_change: Callable[[Key], None]) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self._followed: dict[Key, _Followed] = {}

    def follow(self, cluster: Key, address: str) -> None:
        """Begin, unless it is followed there already."""
        with self._lock:
            known = self._followed.get(cluster)
            if known is not None and known.address == address:
                return
        self.forget(cluster)
        stopping = threading.Event()
        client = ControlClient(address)
        followed = _Followed(
            address,
            threading.Thread(
                target=lambda: self._run(cluster, followed), name=f"fleet-{cluster}", daemon=True
            ),
            stopping,
            client,
        )
        with self._lock:
            self._followed[cluster] = followed
        followed.thread.start()

    def forget(self, cluster: Key) -> None:
        """End a cluster's watch, if there is one."""
        with self._lock:
            followed = self._followed.pop(cluster, None)
        if followed is not None:
            followed.stopping.set()
            followed.client.close()

    def fleet(self, cluster: Key) -> Fleet | None:
        """None while nothing is known: the supervisor is silent or not there yet."""
        with self._lock:
            followed = self._followed.get(cluster)
            return None if followed is None else followed.fleet

    def told(self, cluster: Key) -> tuple[control_pb2.WatchFleetResponse, float] | None:
        """The supervisor's newest answer and when it came; None as for `fleet`."""
        with self._lock:
            followed = self._followed.get(cluster)
            if followed is None or followed.fleet is None or followed.told is None:
                return None
            return followed.told, followed.heard_at_s

    def is_settled(self, cluster: Key) -> bool:
        """Whether it has spoken for so long that all of its workers have registered: one that has
        just started knows of none."""
        with self._lock:
            followed = self._followed.get(cluster)
            if followed is None or followed.fleet is None:
                return False
            return time.monotonic() - followed.known_since_s >= _SETTLED_AFTER_S

    def client(self, cluster: Key) -> ControlClient | None:
        with self._lock:
            followed = self._followed.get(cluster)
            return None if followed is None else followed.client

    def stop(self) -> None:
        for cluster in list(self._followed):
            self.forget(cluster)

    def _run(self, cluster: Key, followed: _Followed) -> None:
        while not followed.stopping.is_set():
            if not self._follow(cluster, followed):
                self._know(cluster, followed, None)
                followed.stopping.wait(_RETRY_S)

    def _follow(self, cluster: Key, followed: _Followed) -> bool:
        """One window of the stream; whether the supervisor still speaks at its end."""
        speaks = False
        try:
            for told in followed.client.watch_fleet(_WINDOW_S):
                followed.told, followed.heard_at_s = told, time.monotonic()
                self._know(cluster, followed, fleet_of(told))
                speaks = True
        except DeadlineError:
            return speaks
        except BatonError as error:
            if followed.fleet is not None:
                log.warning("%s: the supervisor is lost: %s", cluster, error)
        except ValueError:  # gRPC's word for a channel that was closed
            if not followed.stopping.is_set():
                raise
        return False

    def _know(self, cluster: Key, followed: _Followed, fleet: Fleet | None) -> None:
        before, followed.fleet = followed.fleet, fleet
        if before is None:
            followed.known_since_s = time.monotonic()
        if _decisive(before) != _decisive(fleet) and not followed.stopping.is_set():
            self._on_change(cluster)


def _decisive(fleet: Fleet | None) -> object:
    """What is acted on; figures change with every answer and can wait for the next look."""
    if fleet is None:
        return None
    pools = {
        name: (
            pool.desired_replicas,
            pool.role_plan,
            pool.last_error,
            (pool.cohort, pool.cohort_weight),
            [(place.worker_id, place.pod, place.state) for place in pool.places],
        )
        for name, pool in fleet.pools.items()
    }
    return fleet.holds_requests, pools
