"""Keeps one place `<pool>-<index>` of a pool filled.

Life of a place:

1. Adopt the replica that a former supervisor left here, or start one, whole. Where pods are waited
   for, wait for one: that is no failure.
2. Watch: a rank's end, however it came, or the registry's word that the worker has been a suspect
   for `fence_after_s`, ends the replica.
3. Destroy it, by Ray and by pid, until no process is left: only then could its memory be gone. One
   whose end cannot be proved is told and left behind: a place kept empty for it would never serve.
4. Tell the registry why, if it failed, and begin again while the place is wanted: with a back-off
   when replicas die young.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from baton.v1 import control_pb2
from cluster.errors import PodLostError, ReplicaError
from cluster.registry.control_service import Changes
from cluster.registry.registry import FleetEntry, Registration, Registry, WorkerState
from cluster.supervisor.rank_ends import RankEnd
from cluster.supervisor.replica import Replica, ReplicaName, Replicas
from cluster.worker.config import WorkerConfig
from kv_transfer.process import ProcessIdentity

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 0.5
_LONGEST_BACKOFF_S = 10.0
_YOUNG_S = 30.0


@dataclass(frozen=True)
class Ground:
    """What all keepers share. Ray is called on the executor's threads only."""

    registry: Registry
    changes: Changes
    replicas: Replicas
    executor: ThreadPoolExecutor
    worker_config: Callable[[ReplicaName], WorkerConfig]

    async def ray(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.executor, call)


class Keeper:
    """One place and what fills it. Its `run` may be started again after it failed."""

    def __init__(self, pool: str, index: int, ground: Ground, adopted: Replica | None) -> None:
        self.pool = pool
        self.index = index
        self.worker_id = f"{pool}-{index}"
        self.replica = adopted
        """What fills the place, or did: until all of its processes are over."""
        self._ground = ground
        self._limits = ground.registry.pools.settings(pool).config.supervisor
        self._leaving = asyncio.Event()
        self._ended = asyncio.Event()
        self._failure: str | None = None  # why the present replica is over, if it is by a failure
        self._served = adopted is not None and adopted.serves
        self._left_behind = False  # whether a process of the last replica may still be there
        self._backoff_s = 0.0
        self._began_at = 0.0  # when the present replica was adopted, or last tried to be started

    async def run(self) -> None:
        """Fill the place, which is open, for as long as it is wanted."""
        while not self._leaving.is_set() or self.replica is not None:
            self._began_at = time.monotonic()
            if await self._fill():
                await self._keep_until_over()
            if self._leaving.is_set():
                break
            if time.monotonic() - self._began_at < _YOUNG_S:
                await self.back_off()
            else:
                self._backoff_s = 0.0
        if not self._left_behind:
            self._ground.registry.pools.forgive(self.worker_id)

    async def back_off(self) -> None:
        """Wait, longer each time, but not when the place is no longer wanted."""
        self._backoff_s = min(_LONGEST_BACKOFF_S, 2 * self._backoff_s + 0.5)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), self._backoff_s)

    def report(self, error: str, log_file: object = None) -> None:
        """Tell the registry, and so whoever watches, what failed here."""
        text = f"{self.worker_id}: {error}" + (f" (log: {log_file})" if log_file else "")
        times = self._ground.registry.pools.failed(self.pool, self.worker_id, text, self._served)
        log.error("%s%s", text, f"; failed start {times} in a row" if times else "")
        self._ground.changes.announce()

    # --- leaving --------------------------------------------------------------------------------

    def let_go(self) -> None:
        """The place is no longer wanted: the worker drains and leaves."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        self._ground.registry.pools.leaves(self.worker_id)
        self._ask_to_drain()

    def _ask_to_drain(self) -> None:
        """Again and again: a worker that a former supervisor left registers only after a while."""
        try:
            self._ground.registry.ask_drain(self.worker_id)
            self._ground.changes.announce()
        except KeyError:
            if not self._served:  # it has never registered: nothing runs there
                self._ended.set()

    def end_now(self) -> None:
        """The whole cluster ends: so does the replica, whatever it runs."""
        self._leaving.set()
        self._ended.set()

    def ended(self, end: RankEnd) -> None:
        """A rank of a replica is over; the first one says why."""
        if self.replica is not None and self.replica.name == end.replica:
            if not self._ended.is_set() and end.failure is not None:
                self._failure = f"rank {end.rank}: {end.failure}"
            self._ended.set()

    @property
    def watched(self) -> Replica | None:
        """The replica whose end is waited for."""
        return None if self._ended.is_set() else self.replica

    # --- one replica ----------------------------------------------------------------------------

    async def _fill(self) -> bool:
        """Have a replica here: adopted, or a new one. False when it cannot be started."""
        if self.replica is not None:
            return True
        name = ReplicaName.new(self.pool, self.index)
        config = self._ground.worker_config(name)
        self._served, self._failure = False, None
        self._ended.clear()
        try:
            self.replica = await self._started(name, config)
        except PodLostError as error:
            log.info("%s: %s", name, error)
        except ReplicaError as error:
            self.report(str(error), config.log_file(0))
        if self.replica is None:
            self._placed_in(None)
            return False
        if self._leaving.is_set():
            self._ended.set()
        return True

    async def _started(self, name: ReplicaName, config: WorkerConfig) -> Replica | None:
        """None: the place is no longer wanted. Raises ReplicaError."""
        replicas = self._ground.replicas
        if not await self._placed(name, config):
            await self._ground.ray(partial(replicas.destroy, Replica(name, {}, ())))
            return None
        self._began_at = time.monotonic()
        return await self._ground.ray(partial(replicas.start, name, config))

    async def _placed(self, name: ReplicaName, config: WorkerConfig) -> bool:
        """Wait until it has room; False: it is wanted no longer. Raises ReplicaError."""
        ask = partial(self._ground.replicas.place, name, config)
        while (spot := await self._ground.ray(ask)) is None:
            if self._ground.registry.pools.waits(self.worker_id):
                self._ground.changes.announce()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), LOOK_S)
            if self._leaving.is_set():
                return False
        self._placed_in(spot.pod_name)
        return True

    def _placed_in(self, pod_name: str | None) -> None:
        """Tell the registry where new ranks start; None also for: nothing is left here."""
        if self._ground.registry.pools.placed(self.worker_id, pod_name):
            self._ground.changes.announce()

    async def _keep_until_over(self) -> None:
        """From a replica's start or adoption to the end of its last process."""
        replica = self.replica
        assert replica is not None
        reason = await self._until_over()
        log.info("%s: %s", replica.name, reason)
        # Nobody waits to hear of it any more, and its end may take long to prove.
        if self._ground.registry.pools.ends(self.worker_id):
            self._ground.changes.announce()
        problems = [] if self._failure is None or self._leaving.is_set() else [self._failure]
        destroyed = await self._ground.ray(partial(self._ground.replicas.destroy, replica))
        self._left_behind = not destroyed
        if not destroyed:
            # Another one may find its cores or its GPU's memory taken, and say so; or it serves.
            problems.append(f"{replica.name}: not every process is known to be over")
        if problems:
            log_file = self._ground.worker_config(replica.name).log_file(0)
            self.report("; ".join(problems), log_file)
        entry = self._entry()
        if entry is not None:
            self._ground.registry.gone(self.worker_id, entry.registration.incarnation)
        self.replica = None
        self._placed_in(None)
        self._ground.changes.announce()

    async def _until_over(self) -> str:
        """Wait for a reason to end the replica, and name it."""
        registry = self._ground.registry
        began_at = registry.now_s()
        leave_by: float | None = None
        while not self._ended.is_set():
            now = registry.now_s()  # the supervisor's own absence is no worker's silence
            if self._leaving.is_set():
                leave_by = leave_by or now + self._limits.drain_timeout_s
                self._ask_to_drain()
                if now > leave_by:
                    return "did not drain in time"
            self._failure = self._judge(now - began_at)
            if self._failure is not None:
                return self._failure
            try:
                await asyncio.wait_for(self._ended.wait(), LOOK_S)
            except TimeoutError:
                continue
        return self._failure or "a rank has left"

    def _judge(self, waited_s: float) -> str | None:
        """Why the replica has failed, by what the registry knows of it; None: it has not."""
        limits, entry = self._limits, self._entry()
        if entry is None:
            serves = self.replica is not None and self.replica.serves
            limit_s = limits.fence_after_s if serves else limits.start_timeout_s
            return f"did not register within {limit_s:.0f} s" if waited_s > limit_s else None
        self._served = True
        if entry.state is WorkerState.GONE:  # by silence: nobody says that its processes are over
            return "not heard of for so long that the registry has given it up"
        if entry.suspect_s > limits.fence_after_s:
            return f"silent or stuck for more than {limits.fence_after_s:.0f} s"
        return None

    def _entry(self) -> FleetEntry | None:
        """The present replica's standing in the registry; None: not registered."""
        for entry in self._ground.registry.snapshot().workers:
            registration = entry.registration
            if registration.worker_id == self.worker_id and self._is_mine(registration):
                return entry
        return None

    def _is_mine(self, registration: Registration) -> bool:
        """Whether the present replica registered, by its processes: one left behind may still tell
        of itself, and incarnations are times of clocks that can be set back."""
        processes = () if self.replica is None else self.replica.processes
        ranks = control_pb2.WorkerInfo.FromString(registration.info).ref.ranks
        return any(ProcessIdentity.from_proto(rank.process) in processes for rank in ranks)
