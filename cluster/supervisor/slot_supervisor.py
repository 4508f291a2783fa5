"""Keeps one slot `<pool>-<index>` of a pool filled.

Life of a slot:

1. Adopt the replica of a previous supervisor, or start a complete one. On pods, wait for a pod;
   this is no failure.
2. Watch it. The replica ends when any of its ranks ends, or when the registry has held its worker
   SUSPECT for `fence_after_s`.
3. Destroy it by Ray and by pid until no process is left, because only then is its memory free. If
   the end of a process cannot be proved, report that and go on: an empty slot would never serve.
4. Report a failure to the registry, and begin again while the slot is wanted. A replica that dies
   soon after its start adds a back-off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from baton.clock import Clock, LoopClock, wait_for_event
from baton.errors import NotFoundError
from baton.fleet import WorkerState
from baton.pacing import Backoff
from cluster.errors import PodLostError, ReplicaError
from cluster.registry.control_service import Changes
from cluster.registry.registry import FleetEntry, Registry
from cluster.supervisor.replica import RankEnd, Replica, ReplicaName, Replicas
from cluster.worker.config import WorkerConfig

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 0.5
_YOUNG_S = 30.0


@dataclass(frozen=True)
class SlotContext:
    """What all slot supervisors share. Only the executor's threads call Ray."""

    registry: Registry
    changes: Changes
    replicas: Replicas
    executor: ThreadPoolExecutor
    worker_config: Callable[[ReplicaName], WorkerConfig]
    clock: Clock = field(default_factory=LoopClock)

    async def ray(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.executor, call)


class SlotSupervisor:
    """One slot and its replica. `run` may be called again after it failed."""

    def __init__(
        self, pool: str, index: int, context: SlotContext, adopted: Replica | None
    ) -> None:
        self.pool = pool
        self.index = index
        self.worker_id = f"{pool}-{index}"
        self.replica = adopted
        """The slot's replica, until all its processes have ended."""
        self._context = context
        self._limits = context.registry.pools.settings(pool).config.supervisor
        self._leaving = asyncio.Event()
        self._ended = asyncio.Event()
        self._failure: str | None = None  # why the present replica failed, if it did
        self._served = adopted is not None and adopted.serves
        self._left_behind = False  # whether a process of the last replica may be left
        self._backoff = Backoff(0.5, 10.0)
        self._began_at = 0.0  # when the present replica was adopted or its start began

    async def run(self) -> None:
        """Keep the open slot filled for as long as it is wanted."""
        while not self._leaving.is_set() or self.replica is not None:
            self._began_at = self._context.clock.now_s()
            if await self._fill():
                await self._keep_until_over()
            if self._leaving.is_set():
                break
            if self._context.clock.now_s() - self._began_at < _YOUNG_S:
                await self.back_off()
            else:
                self._backoff.reset()
        if not self._left_behind:
            self._context.registry.pools.clear_failure(self.worker_id)

    async def back_off(self) -> None:
        """Wait, longer each time, unless the slot is no longer wanted."""
        await wait_for_event(self._context.clock, self._leaving, self._backoff.next_s())

    def report(self, error: str, log_file: object = None) -> None:
        """Log a failure and report it to the registry, whose watchers see it."""
        text = f"{self.worker_id}: {error}" + (f" (log: {log_file})" if log_file else "")
        times = self._context.registry.pools.record_failure(
            self.pool, self.worker_id, text, self._served
        )
        log.error("%s%s", text, f"; failed start {times} in a row" if times else "")
        self._context.changes.announce()

    # --- leaving --------------------------------------------------------------------------------

    def drain(self) -> None:
        """The slot is no longer wanted: let its worker drain and leave."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        self._context.registry.pools.update_slot(self.worker_id, is_leaving=True)
        self._ask_to_drain()

    def _ask_to_drain(self) -> None:
        """Ask the worker to drain. Repeated, because an adopted worker registers only later."""
        try:
            self._context.registry.ask_drain(self.worker_id)
            self._context.changes.announce()
        except NotFoundError:
            if not self._served:  # it has never registered, so it runs nothing
                self._ended.set()

    def end_now(self) -> None:
        """The whole cluster ends: end the replica at once."""
        self._leaving.set()
        self._ended.set()

    def rank_ended(self, end: RankEnd) -> None:
        """Take the end of a rank. The first one gives the failure."""
        if self.replica is not None and self.replica.name == end.replica:
            if not self._ended.is_set() and end.failure is not None:
                self._failure = f"rank {end.rank}: {end.failure}"
            self._ended.set()

    @property
    def watched(self) -> Replica | None:
        """The replica to watch, if it has not ended."""
        return None if self._ended.is_set() else self.replica

    # --- one replica ----------------------------------------------------------------------------

    async def _fill(self) -> bool:
        """Get a replica, adopted or new. False: it could not be started."""
        if self.replica is not None:
            return True
        name = ReplicaName.new(self.pool, self.index)
        config = self._context.worker_config(name)
        self._served, self._failure = False, None
        self._ended.clear()
        replicas = self._context.replicas
        try:
            if await self._placed(name, config):
                self._began_at = self._context.clock.now_s()
                start = partial(replicas.start, name, config)
                self.replica = await self._context.ray(start)
            else:
                await self._context.ray(partial(replicas.destroy, Replica(name)))
        except PodLostError as error:
            log.info("%s: %s", name, error)
        except ReplicaError as error:
            self.report(str(error), config.log_file(0))
        if self.replica is None:
            self._update(pod_name=None, is_pending=False)
            return False
        if self._leaving.is_set():
            self._ended.set()
        return True

    async def _placed(self, name: ReplicaName, config: WorkerConfig) -> bool:
        """Wait for room. False: the slot is no longer wanted. Raises ReplicaError, and PodLostError
        if its pod was closed meanwhile."""
        pools, replicas = self._context.registry.pools, self._context.replicas
        ask = partial(replicas.reserve, name, config, pools.closed_pods)
        while (pod_name := await self._context.ray(ask)) is None:
            self._update(pod_name=None, is_pending=True)
            if await wait_for_event(self._context.clock, self._leaving, LOOK_S):
                return False
        if pod_name in pools.closed_pods:
            await self._context.ray(partial(replicas.destroy, Replica(name)))
            raise PodLostError(f"pod {pod_name} is closed")
        self._update(pod_name=pod_name or None, is_pending=False)
        return True

    def _update(self, **changes: Any) -> None:
        """Report the slot to the registry. No adopted replica serves in it any more."""
        pools = self._context.registry.pools
        if pools.update_slot(self.worker_id, is_adopted=False, **changes):
            self._context.changes.announce()

    async def _keep_until_over(self) -> None:
        """Watch the replica, destroy it at its end, and report a failure."""
        replica = self.replica
        assert replica is not None
        reason = await self._until_over()
        log.info("%s: %s", replica.name, reason)
        # Before it is destroyed: proving the end may take long, and no one should wait for it.
        self._update()
        problems = [] if self._failure is None or self._leaving.is_set() else [self._failure]
        destroyed = await self._context.ray(partial(self._context.replicas.destroy, replica))
        self._left_behind = not destroyed
        if not destroyed:
            # The next replica may find cores or GPU memory taken, and then fails with that error.
            problems.append(f"{replica.name}: not every process has provably ended")
        if problems:
            log_file = self._context.worker_config(replica.name).log_file(0)
            self.report("; ".join(problems), log_file)
        entry = self._entry()
        if entry is not None:
            self._context.registry.gone(self.worker_id, entry.registration.incarnation)
        self.replica = None
        self._update(pod_name=None, is_pending=False)
        self._context.changes.announce()  # the worker is gone

    async def _until_over(self) -> str:
        """Wait for a reason to end the replica, and return it."""
        registry = self._context.registry
        began_at = registry.now_s()
        leave_by: float | None = None
        while not self._ended.is_set():
            now = registry.now_s()  # time in which the supervisor was awake
            if self._leaving.is_set():
                leave_by = leave_by or now + self._limits.drain_timeout_s
                self._ask_to_drain()
                if now > leave_by:
                    return "did not drain in time"
            self._failure = self._judge(now - began_at)
            if self._failure is not None:
                return self._failure
            await wait_for_event(self._context.clock, self._ended, LOOK_S)
        return self._failure or "a rank has left"

    def _judge(self, waited_s: float) -> str | None:
        """Why the replica has failed, according to the registry; None: it has not."""
        limits, entry = self._limits, self._entry()
        if entry is None:
            serves = self.replica is not None and self.replica.serves
            limit_s = limits.fence_after_s if serves else limits.start_timeout_s
            return f"did not register within {limit_s:.0f} s" if waited_s > limit_s else None
        self._served = True
        if entry.state is WorkerState.GONE:  # by silence, without proof that its processes ended
            return "silent for so long that the registry counts it as gone"
        if entry.suspect_s > limits.fence_after_s:
            return f"silent or stuck for more than {limits.fence_after_s:.0f} s"
        return None

    def _entry(self) -> FleetEntry | None:
        """The present replica's entry in the registry; None: not registered. It is known by its
        processes: a replica that was left behind may still report, and incarnations depend on
        clocks that can be set back."""
        entries = self._context.registry.workers()
        entry = next((e for e in entries if e.registration.worker_id == self.worker_id), None)
        if entry is None or self.replica is None:
            return None
        return entry if entry.registration.processes & {*self.replica.processes} else None
