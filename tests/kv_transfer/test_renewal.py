"""A lease lasts while it is served: by time and the engine's state, not by what was pushed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest
from manual_scheduler import ManualScheduler
from transfer_sides import ONE_HEAD, Side, SideSpec

from baton.clock import ManualClock
from baton.config.transfer import TransferConfig
from kv_transfer.errors import CancelledHandoffError, HandoffTimeoutError
from kv_transfer.lease import Receipt
from kv_transfer.lease_table import LeaseFailure, LeaseState
from kv_transfer.memory_transport import MemoryNetwork

CONFIG = TransferConfig(transport="memory", renew_within_s=6, ack_timeout_s=4)


@dataclass(frozen=True)
class Pair:
    clock: ManualClock
    scheduler: ManualScheduler
    sender: Side
    receiver: Side

    async def wait(self, seconds: int, without: tuple[str, ...] = ()) -> None:
        kinds = tuple(kind for kind in ("put", "flush", "message") if kind not in without)
        for _ in range(4 * seconds):
            self.clock.advance(0.25)
            self.scheduler.run_all(kinds)
            await asyncio.sleep(0)  # what has arrived is read


@pytest.fixture
async def pair(request: pytest.FixtureRequest) -> Pair:
    """Its parameter, if any, is the `ack_timeout_s`."""
    config = replace(CONFIG, ack_timeout_s=getattr(request, "param", CONFIG.ack_timeout_s))
    clock, scheduler = ManualClock(), ManualScheduler()
    network = MemoryNetwork(scheduler)
    sender, receiver = (
        Side(SideSpec(name, 1, ONE_HEAD, config), [network.join()], clock)
        for name in ("sender", "receiver")
    )
    return Pair(clock, scheduler, sender, receiver)


async def test_a_prompt_that_only_waits_keeps_its_lease_until_the_engine_is_no_longer_well(
    pair: Pair,
) -> None:
    lease = pair.receiver.grant("r", pair.sender.identity, [[1]])
    pair.sender.open(lease)
    await pair.wait(20)
    assert pair.receiver.table.state(lease.lease_id) is LeaseState.GRANTED
    pair.sender.engine_is_well = False
    await pair.wait(3)  # a step may be judged wrongly for a while
    pair.sender.engine_is_well = True
    await pair.wait(20)
    assert pair.receiver.table.state(lease.lease_id) is LeaseState.GRANTED
    pair.sender.engine_is_well = False
    await pair.wait(7)
    assert pair.receiver.events[0] == ("failed", "r", LeaseFailure.EXPIRED)


@pytest.mark.parametrize("pair", [60.0], indirect=True)
async def test_what_is_being_finished_keeps_its_lease_whatever_becomes_of_the_engine(
    pair: Pair,
) -> None:
    lease = pair.receiver.grant("r", pair.sender.identity, [[1]])
    handoff = pair.sender.open(lease)
    await pair.wait(3)
    pair.sender.engine_is_well = False
    finishing = asyncio.create_task(pair.sender.finish(handoff))  # nothing is pushed
    await pair.wait(20)
    assert pair.receiver.table.state(lease.lease_id) is LeaseState.GRANTED
    cancelling = asyncio.create_task(pair.sender.cancel(handoff))
    await pair.wait(1)
    await asyncio.wait({finishing, cancelling})
    assert isinstance(finishing.exception(), CancelledHandoffError)


async def test_a_handoff_that_is_over_renews_nothing(pair: Pair) -> None:
    lease = pair.receiver.grant("r", pair.sender.identity, [[1]])
    handoff = pair.sender.open(lease)
    cancelling = asyncio.create_task(pair.sender.cancel(handoff))
    await pair.wait(1)
    await cancelling
    assert [event[0] for event in pair.receiver.events] == ["failed", "quiescent"]
    pair.scheduler.run_all()
    pair.clock.advance(30)
    assert pair.scheduler.pending == []


async def test_the_ack_timeout_counts_from_the_last_flush_that_ended_not_from_the_first_token(
    pair: Pair,
) -> None:
    """Several prompts on a slow link: each waits for those before it."""
    finishing = []
    for number in range(1, 5):
        lease = pair.receiver.grant(f"r{number}", pair.sender.identity, [[number]])
        handoff = pair.sender.open(lease)
        pair.sender.push(handoff, 0, [0], [number])
        finishing.append(asyncio.create_task(pair.sender.finish(handoff)))
    await asyncio.sleep(0)
    for number, task in enumerate(finishing):
        await pair.wait(2, without=("flush",))  # 3 a prompt, of the 4 that the timeout lasts
        assert not any(task.done() for task in finishing[number:])
        pair.scheduler.run(next(o for o in pair.scheduler.pending if o.kind == "flush"))
        await pair.wait(1, without=("flush",))
        assert isinstance(await task, Receipt)


async def test_what_no_longer_moves_ends_in_a_timeout_whatever_moves_for_others(
    pair: Pair,
) -> None:
    tasks = []
    for number in (1, 2):
        lease = pair.receiver.grant(f"r{number}", pair.sender.identity, [[number]])
        handoff = pair.sender.open(lease)
        if number == 1:  # of the second nothing is ever pushed
            pair.sender.push(handoff, 0, [0], [number])
        tasks.append(asyncio.create_task(pair.sender.finish(handoff)))
    await pair.wait(3, without=("flush",))
    pair.scheduler.run(next(o for o in pair.scheduler.pending if o.kind == "flush"))
    await pair.wait(2)
    assert isinstance(await tasks[0], Receipt)
    assert isinstance(tasks[1].exception(), HandoffTimeoutError)
