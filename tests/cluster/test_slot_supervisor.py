"""A slot supervisor over a real registry and in-memory replicas, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import cast

import pytest

from baton.clock import ManualClock
from baton.config.workers import RegistryConfig, SupervisorConfig
from cluster.errors import PodLostError
from cluster.pools.pool_table import Pool
from cluster.progress import Progress
from cluster.registry.control_service import Changes
from cluster.registry.registry import Registration, Registry, Stream
from cluster.supervisor.replica import RankEnd, Replica
from cluster.supervisor.slot_supervisor import LOOK_S, SlotContext, SlotSupervisor
from cluster.worker.config import WorkerConfig
from kv_transfer.process import ProcessIdentity
from tests.cluster.memory_replicas import PROCESS, MemoryReplicas, replica_of
from tests.cluster.pool_settings import settings_of

ADOPTED = dataclasses.replace(replica_of("decode", 1), processes=(PROCESS,))
LOADING = dataclasses.replace(ADOPTED, serves=False)


class LogFile:
    """The only part of a worker's config that a slot supervisor reads."""

    def log_file(self, rank: int) -> str:
        return f"rank{rank}.log"


class Slot:
    """One supervised slot. Time passes only in `pass_s` and `until`."""

    def __init__(
        self, replicas: MemoryReplicas, adopted: Replica | None, executor: ThreadPoolExecutor,
        **settings: float,
    ) -> None:  # fmt: skip
        self.replicas, self.clock, self.changes = replicas, ManualClock(), Changes()
        self.registry = Registry(RegistryConfig(), self.clock.now_s)
        self.registry.pools.add(settings_of(supervisor=SupervisorConfig(**settings)), 1)
        served = adopted is not None and adopted.serves
        pod_name = None if adopted is None else adopted.pod_name
        self.registry.pools.open_slot("decode", "decode-1", pod_name, is_adopted=served)
        context = SlotContext(
            self.registry,
            self.changes,
            replicas,
            executor,
            lambda name: cast(WorkerConfig, LogFile()),
            self.clock,
        )
        self.supervisor = SlotSupervisor("decode", 1, context, adopted)
        self.running = asyncio.create_task(self.supervisor.run())

    async def pass_s(self, seconds: float) -> None:
        """Let time pass in small steps, in which the registry looks as often as it must."""
        end_s = self.clock.now_s() + seconds
        while self.clock.now_s() < end_s:
            await asyncio.sleep(0.001)  # calls of the replicas return on real threads
            self.clock.advance(0.05)
            self.registry.refresh()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await self.pass_s(0.05)

    async def over(self) -> None:
        """Wait for the end of the supervisor's `run`, and raise its error."""
        await self.until(self.running.done)
        self.running.result()

    def end_rank(self, failure: str | None) -> None:
        self.supervisor.rank_ended(RankEnd(ADOPTED.name, 0, failure))

    def register(self, incarnation: int, process: ProcessIdentity) -> Stream:
        """Register a worker of this slot and make it live."""
        registration = Registration("decode-1", incarnation, "decode", b"")
        registration = dataclasses.replace(registration, processes=frozenset({process}))
        stream = self.registry.register(registration)
        assert stream is not None
        self.registry.heartbeat(stream, Progress(True, 0.0, 0.01), b"", draining=False)
        return stream

    @property
    def pool(self) -> Pool:
        (pool,) = self.registry.pools.status()
        return pool

    @property
    def failures(self) -> tuple[str, int]:
        return self.pool.last_error, self.pool.num_failed_starts

    @property
    def pod_names(self) -> list[str | None]:
        return [slot.pod_name for slot in self.pool.slots]


@asynccontextmanager
async def supervised_slot(
    replicas: MemoryReplicas, adopted: Replica | None = None, **settings: float
) -> AsyncIterator[Slot]:
    with ThreadPoolExecutor(1) as executor:
        slot = Slot(replicas, adopted, executor, **settings)
        yield slot
        slot.supervisor.end_now()
        if not slot.running.done():
            await slot.over()


async def test_a_slot_without_a_pod_is_pending_and_filled_as_soon_as_there_is_one() -> None:
    replicas = MemoryReplicas()
    replicas.has_room = False
    async with supervised_slot(replicas) as slot:
        await slot.until(lambda: len(replicas.requested) >= 3)
        assert slot.pool.pending_replicas == 1
        assert slot.failures == ("", 0)
        replicas.has_room, came_at = True, slot.clock.now_s()
        await slot.until(lambda: replicas.started)
        assert slot.clock.now_s() - came_at < 3 * LOOK_S
        assert set(replicas.requested) == set(replicas.started)  # one name, requested repeatedly
        assert slot.pool.pending_replicas == 0


async def test_a_pod_that_closes_while_its_room_is_reserved_gets_no_worker() -> None:
    """The operator has been told by then that nothing will be placed there."""
    replicas = MemoryReplicas()
    async with supervised_slot(replicas) as slot:
        slot.registry.pools.close_pods([replicas.pod_name])  # the slot's task has not run yet
        await slot.until(lambda: len(replicas.requested) >= 2)
        assert (replicas.destroyed[0], replicas.started) == (replicas.requested[0], [])
        replicas.pod_name = "another"
        await slot.until(lambda: replicas.started)
        assert (slot.pod_names, slot.failures) == (["another"], ("", 0))


async def test_a_slot_that_waits_for_a_pod_announces_it_once() -> None:
    replicas = MemoryReplicas()
    replicas.has_room = False
    async with supervised_slot(replicas) as slot:
        await slot.until(lambda: slot.pool.pending_replicas)
        announced, num_requested = (
            asyncio.create_task(slot.changes.wait(60)),
            len(replicas.requested),
        )
        await slot.until(lambda: len(replicas.requested) >= num_requested + 3)
        assert not announced.done()
        replicas.has_room = True
        await slot.until(announced.done)
        assert slot.pool.pending_replicas == 0


async def test_a_slot_that_waits_for_a_pod_and_is_drained_requests_no_room_any_more() -> None:
    replicas = MemoryReplicas()
    replicas.has_room = False
    async with supervised_slot(replicas) as slot:
        await slot.until(lambda: slot.pool.pending_replicas)
        slot.supervisor.drain()
        await slot.over()
        assert replicas.destroyed == [replicas.requested[0]]
        assert slot.pool.pending_replicas == 0


async def test_a_slot_reports_its_pod_before_its_worker_registers_and_none_once_it_is_empty() -> (
    None
):
    replicas = MemoryReplicas()
    async with supervised_slot(
        replicas, dataclasses.replace(ADOPTED, pod_name="former pod")
    ) as slot:
        await slot.pass_s(0.1)
        (entry,) = slot.pool.slots
        assert (entry.pod_name, entry.is_adopted) == ("former pod", True)
        replicas.has_room = False
        slot.end_rank("killed")
        await slot.until(lambda: slot.pool.pending_replicas)
        (entry,) = slot.pool.slots
        assert (entry.pod_name, entry.is_adopted) == (None, False)
        replicas.has_room = True
        await slot.until(lambda: slot.pod_names == ["pod"])
        assert slot.registry.workers() == ()
        slot.supervisor.end_now()
        await slot.over()
        assert slot.pod_names == [None]


async def test_a_failed_adopted_worker_is_not_awaited_while_its_end_is_being_proved() -> None:
    replicas = MemoryReplicas()
    replicas.may_destroy.clear()
    replicas.destroy_errors.append(OSError("its machine does not answer"))
    found = dataclasses.replace(ADOPTED, pod_name="former pod")
    async with supervised_slot(replicas, found) as slot:
        await slot.pass_s(0.1)
        assert slot.registry.awaits_adopted("decode")
        version = slot.registry.refresh()
        slot.end_rank("killed")
        await slot.until(lambda: replicas.destroyed)
        assert not slot.registry.awaits_adopted("decode")
        assert slot.registry.refresh() > version
        assert slot.pod_names == ["former pod"]  # something may be left there
        replicas.may_destroy.set()
        with pytest.raises(OSError, match="does not answer"):
            await slot.over()
        assert not slot.registry.awaits_adopted("decode")
        slot.supervisor.end_now()
        await asyncio.wait_for(slot.supervisor.run(), 10)


async def test_a_pod_that_goes_before_anything_runs_there_is_no_failed_start() -> None:
    replicas = MemoryReplicas()
    replicas.start_errors.append(PodLostError("its pod went away"))
    async with supervised_slot(replicas) as slot:
        await slot.until(lambda: replicas.started)
        assert slot.failures == ("", 0)
        assert len(set(replicas.requested)) == 2


async def test_a_drain_continues_when_the_supervisor_restarts_before_its_worker_registers() -> None:
    replicas = MemoryReplicas()
    async with supervised_slot(replicas, ADOPTED) as slot:
        slot.supervisor.drain()
        await slot.pass_s(0.1)
        assert replicas.destroyed == []  # it drains, though the registry does not know it yet
        stream = slot.register(7, PROCESS)
        await slot.until(lambda: slot.registry.drain_asked(stream))
        assert replicas.destroyed == []
        slot.end_rank(None)
        await slot.over()
        assert replicas.destroyed == [ADOPTED.name]


@pytest.mark.parametrize(("found", "num_ends"), [(ADOPTED, 1), (LOADING, 0)])
async def test_an_adopted_replica_that_served_and_does_not_register_again_counts_as_hung(
    found: Replica, num_ends: int
) -> None:
    """A replica that was still loading has the whole start's time."""
    replicas = MemoryReplicas()
    async with supervised_slot(replicas, found, fence_after_s=0.01) as slot:
        await slot.pass_s(2.5 * LOOK_S)
        assert len(replicas.destroyed) == num_ends
        assert slot.pool.last_error.startswith("decode-1: did not register") == found.serves


async def test_a_replica_that_the_registry_counts_as_gone_has_failed() -> None:
    async with supervised_slot(MemoryReplicas(), ADOPTED) as slot:
        slot.register(7, PROCESS)
        slot.registry.gone("decode-1", 7)
        await slot.until(lambda: slot.pool.last_error)
        assert "decode-1: silent for so long" in slot.pool.last_error
        assert slot.replicas.destroyed == [ADOPTED.name]


async def test_a_replica_whose_end_cannot_be_proved_is_reported_and_its_slot_filled_again() -> None:
    replicas = MemoryReplicas()
    replicas.proves_ends = False
    async with supervised_slot(replicas, ADOPTED) as slot:
        slot.end_rank("boom")
        await slot.until(lambda: replicas.started)
        problem = "decode-1.g1: not every process has provably ended (log: rank0.log)"
        assert slot.pool.last_error == f"decode-1: rank 0: boom; {problem}"
        slot.supervisor.end_now()  # no longer wanted, but what it holds is still held
        await slot.over()
        assert "not every process has provably ended" in slot.pool.last_error


async def test_a_successor_whose_clock_was_set_back_is_known_by_its_processes() -> None:
    replicas = MemoryReplicas()
    async with supervised_slot(replicas, ADOPTED, start_timeout_s=2.5 * LOOK_S) as slot:
        slot.register(1000, PROCESS)
        slot.end_rank("killed")
        await slot.until(lambda: replicas.started)
        (successor,) = replicas.started
        stream = slot.register(10, replicas.process_of(successor))  # smaller, but accepted
        for _ in range(10):
            await slot.pass_s(LOOK_S / 2)
            slot.registry.heartbeat(stream, Progress(True, 0.0, 0.01), b"", draining=False)
        assert replicas.destroyed == [ADOPTED.name]
        assert slot.pool.last_error == ""


async def test_what_is_left_of_a_previous_replica_does_not_count_as_its_successor() -> None:
    replicas = MemoryReplicas()
    replicas.proves_ends = False
    async with supervised_slot(replicas, ADOPTED, start_timeout_s=2.5 * LOOK_S) as slot:
        slot.end_rank("boom")
        await slot.until(lambda: replicas.started)
        slot.register(1000, PROCESS)  # the old replica reports again, its successor does not
        await slot.until(lambda: "did not register" in slot.pool.last_error)
        assert replicas.destroyed == [ADOPTED.name, replicas.started[0]]


async def test_an_adopted_replica_that_never_served_has_failed_to_start() -> None:
    async with supervised_slot(MemoryReplicas(), LOADING) as slot:
        slot.end_rank("no such model")
        await slot.until(lambda: slot.pool.last_error)
        assert slot.pool.num_failed_starts == 1


async def test_an_adopted_replica_that_still_loads_is_drained_at_once() -> None:
    async with supervised_slot(MemoryReplicas(), LOADING) as slot:
        slot.supervisor.drain()
        await slot.over()
        assert slot.replicas.destroyed == [ADOPTED.name]


async def test_replicas_that_die_young_are_started_again_at_growing_intervals() -> None:
    replicas = MemoryReplicas()
    replicas.start_errors += [PodLostError("its pod went away") for _ in range(4)]
    async with supervised_slot(replicas) as slot:
        times = []
        for number in range(1, 6):
            await slot.until(lambda number=number: replicas.num_begun == number)
            times.append(slot.clock.now_s())
        pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert pauses == sorted(pauses)
        assert pauses[-1] > 2 * pauses[0]
