"""Pools and slots, as supervisors report them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from baton.control.client import NOTHING_SEEN, SeenByClients, seen_by_clients
from baton.fleet import WorkerState
from baton.v1 import control_pb2
from baton.wire import STATE_OF, STATES

_HERE = frozenset(STATE_OF) - {STATES[WorkerState.GONE]}


@dataclass(frozen=True)
class Slot:
    """One slot of a pool, as the supervisor reports it."""

    worker_id: str
    pod: str
    """Where its worker runs or starts; empty while it has no pod."""
    state: WorkerState | None
    """None: pending, no pod has room for it yet."""
    num_running: int = 0
    num_waiting: int = 0
    kv_use: float = 0.0
    """Share of its KV blocks that are in use."""


@dataclass(frozen=True)
class FleetPool:
    """A pool, as the supervisor reports it."""

    desired_replicas: int
    slots: Sequence[Slot]
    last_error: str = ""
    role_plan: tuple[int, int] = (0, 0)
    """Workers that act as prefill alone and as decode alone."""
    seen: SeenByClients = NOTHING_SEEN


@dataclass(frozen=True)
class Fleet:
    """All pools that the supervisor knows, by name."""

    pools: Mapping[str, FleetPool]
    holds_requests: bool = False
    """Whether routers hold some for pools that are at zero."""
    closed_pods: frozenset[str] = frozenset()
    """Nothing is placed there any more."""


@dataclass(frozen=True)
class Heard:
    """What a supervisor has reported, at one moment."""

    fleet: Fleet | None = None
    """None while nothing is known: the supervisor is silent or not there yet."""
    answer: tuple[control_pb2.WatchFleetResponse, float] | None = None
    """What `fleet` was made of, and when it came: seconds of any one clock."""
    is_certain: bool = False
    """Whether it has answered or been silent, which a new listener does not know."""

    def pool(self, name: str) -> FleetPool | None:
        """Return a pool; None while the supervisor is silent, or does not know it."""
        return None if self.fleet is None else self.fleet.pools.get(name)

    @property
    def settles(self) -> bool:
        """Tell whether the supervisor says that workers may have yet to register."""
        return self.answer is not None and self.answer[0].settles

    @property
    def is_settled(self) -> bool:
        return self.fleet is not None and not self.settles


NOTHING_HEARD = Heard()


def fleet_of(answer: control_pb2.WatchFleetResponse) -> Fleet:
    """Read a supervisor's answer as slots of pools. The wire calls a slot a place."""
    pools, seen = {}, seen_by_clients(answer.routers)
    for pool in answer.pools:
        workers = [w for w in answer.workers if w.info.pool == pool.name and w.state in _HERE]
        slots = {worker.info.ref.worker_id: _slot(worker) for worker in workers}
        starting = {slot.worker_id: slot.pod_name for slot in pool.places}
        wanted = dict.fromkeys(_to_come(pool), "")
        for worker_id, pod in sorted((wanted | starting).items()):
            state = WorkerState.STARTING if pod else None
            slots.setdefault(worker_id, Slot(worker_id, pod, state))
        pools[pool.name] = FleetPool(
            pool.desired_replicas,
            tuple(slots.values()),
            pool.last_error,
            (pool.role_plan.prefill, pool.role_plan.decode),
            seen.get(pool.name, NOTHING_SEEN),
        )
    holds_requests = any(router.num_held for router in answer.routers)
    return Fleet(pools, holds_requests, frozenset(answer.closed_pods))


def _to_come(pool: control_pb2.PoolStatus) -> list[str]:
    """List the slots of a pool's size that the supervisor may not have opened yet."""
    staying = {slot.worker_id for slot in pool.places if slot.HasField("standing")}
    numbered = (f"{pool.name}-{index}" for index in count())
    free = (worker_id for worker_id in numbered if worker_id not in staying)
    return list(islice(free, max(0, pool.desired_replicas - len(staying))))


def _slot(worker: control_pb2.FleetWorker) -> Slot:
    load = worker.load
    num_taken = load.num_blocks - load.num_free_blocks
    return Slot(
        worker_id=worker.info.ref.worker_id,
        pod=worker.info.pod_name,
        state=STATE_OF[worker.state],
        num_running=load.num_running + load.num_reserved,
        num_waiting=load.num_waiting,
        kv_use=num_taken / load.num_blocks if load.num_blocks else 0.0,
    )


def merged(heard: Mapping[str, Heard]) -> Heard:
    """Merge what several supervisors report, the oldest first, into one fleet. `heard`: by names; a
    worker of the second is called `<name>/<worker>`."""
    if len(heard) == 1:
        return next(iter(heard.values()))
    spoken = [(name, each) for name, each in heard.items() if each.answer is not None]
    if not spoken:
        return Heard(is_certain=not heard or any(each.is_certain for each in heard.values()))
    both, at_s = control_pb2.WatchFleetResponse(), 0.0
    for name, each in spoken:
        assert each.answer is not None
        answer, answered_at_s = each.answer
        both.MergeFrom(answer if name == next(iter(heard)) else _prefixed(answer, f"{name}/"))
        at_s = max(at_s, answered_at_s)
    pools: dict[str, control_pb2.PoolStatus] = {}
    for pool in both.pools:
        _add(pools.setdefault(pool.name, control_pb2.PoolStatus()), pool)
    del both.pools[:]
    both.pools.extend(pools.values())
    return Heard(fleet_of(both), (both, at_s), is_certain=True)


def _prefixed(
    answer: control_pb2.WatchFleetResponse, prefix: str
) -> control_pb2.WatchFleetResponse:
    found = control_pb2.WatchFleetResponse()
    found.CopyFrom(answer)
    for worker in found.workers:
        worker.info.ref.worker_id = f"{prefix}{worker.info.ref.worker_id}"
    for pool in found.pools:
        for slot in pool.places:
            slot.worker_id = f"{prefix}{slot.worker_id}"
    return found


def _add(pool: control_pb2.PoolStatus, more: control_pb2.PoolStatus) -> None:
    """Add one pool's figures to another's. Sizes are sums; else the newest's values hold."""
    desired = pool.desired_replicas + more.desired_replicas
    live = pool.live_replicas + more.live_replicas
    pending = pool.pending_replicas + more.pending_replicas
    pool.MergeFrom(more)
    pool.desired_replicas, pool.live_replicas, pool.pending_replicas = desired, live, pending
