"""One watch of each cluster's control service: what the supervisor says of its pools.

A thread for each cluster follows the stream and keeps the newest answer; a stream that breaks, or
says nothing for a whole window, makes the fleet unknown until the next one tells.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from baton.control_client import ControlClient
from baton.errors import BatonError, DeadlineError
from baton.v1 import control_pb2
from deploy.controller.objects import Key
from deploy.controller.observed import Fleet, FleetPool, Place, PlaceState

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_WINDOW_S = 10.0
_STATES = {
    control_pb2.WORKER_STATE_STARTING: PlaceState.STARTING,
    control_pb2.WORKER_STATE_LIVE: PlaceState.LIVE,
    control_pb2.WORKER_STATE_SUSPECT: PlaceState.SUSPECT,
    control_pb2.WORKER_STATE_DRAINING: PlaceState.DRAINING,
}


def fleet_of(told: control_pb2.WatchFleetResponse) -> Fleet:
    """What the supervisor says, as places of pools."""
    pools = {}
    for pool in told.pools:
        workers = [w for w in told.workers if w.info.pool == pool.name and w.state in _STATES]
        places = [_place(worker) for worker in workers]
        wanted = {f"{pool.name}-{index}" for index in range(pool.desired_replicas)}
        for worker_id in sorted(wanted - {place.worker_id for place in places}):
            places.append(Place(worker_id, "", PlaceState.PENDING))
        pools[pool.name] = FleetPool(
            pool.desired_replicas,
            tuple(places),
            pool.last_error,
            (pool.role_plan.prefill, pool.role_plan.decode),
        )
    return Fleet(pools)


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
        decode_step_s=load.decode_step_s,
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
    """What `fleet` was made of, or newer: figures change with every answer."""


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

    def told(self, cluster: Key) -> control_pb2.WatchFleetResponse | None:
        """The supervisor's newest answer; None as for `fleet`."""
        with self._lock:
            followed = self._followed.get(cluster)
            return None if followed is None or followed.fleet is None else followed.told

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
                followed.told = told
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
        if followed.fleet != fleet and not followed.stopping.is_set():
            followed.fleet = fleet
            self._on_change(cluster)
