"""A lease lasts while it is served: by time and the engine's state, not by what was pushed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from transfer_sides import ONE_HEAD, Side, SideSpec

from kv_transfer.clock import ManualClock
from kv_transfer.config import TransferConfig
from kv_transfer.errors import CancelledHandoffError
from kv_transfer.lease_table import LeaseFailure, LeaseState
from kv_transfer.memory_transport import ManualScheduler, MemoryNetwork

CONFIG = TransferConfig(transport="memory", renew_within_s=6, ack_timeout_s=4)


@dataclass(frozen=True)
class Pair:
    clock: ManualClock
    scheduler: ManualScheduler
    sender: Side
    receiver: Side

    async def wait(self, seconds: int) -> None:
        for _ in range(4 * seconds):
            self.clock.advance(0.25)
            self.scheduler.run_all()
            await asyncio.sleep(0)  # what has arrived is read


@pytest.fixture
async def pair() -> Pair:
    clock, scheduler = ManualClock(), ManualScheduler()
    network = MemoryNetwork(scheduler)
    sender, receiver = (
        Side(SideSpec(name, 1, ONE_HEAD, CONFIG), [network.join()], clock)
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


async def test_what_is_being_finished_keeps_its_lease_whatever_becomes_of_the_engine(
    pair: Pair,
) -> None:
    lease = pair.receiver.grant("r", pair.sender.identity, [[1]])
    handoff = pair.sender.open(lease)
    await pair.wait(3)
    pair.sender.engine_is_well = False
    finishing = asyncio.create_task(pair.sender.finish(handoff, timeout_s=60))  # nothing is pushed
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
