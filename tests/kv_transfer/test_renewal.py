"""A lease lasts while it is served: by time and the engine's state, not by what was pushed."""

from __future__ import annotations

import asyncio

import pytest
from manual_world import World, begin_finish

from kv_transfer.errors import HandoffError
from kv_transfer.lease import Receipt
from kv_transfer.lease_table import LeaseFailure, LeaseState


async def test_a_prompt_that_only_waits_keeps_its_lease_until_the_engine_is_no_longer_well(
    world: World,
) -> None:
    lease = world.grant([[1], [1]])
    handoff = world.sender.open(lease)
    await world.wait(20)
    assert world.receiver.table.state(lease.lease_id) is LeaseState.GRANTED
    world.sender.engine_is_well = False
    await world.wait(3)  # a step may be judged wrongly for a while
    world.sender.engine_is_well = True
    await world.wait(20)
    assert world.receiver.table.state(lease.lease_id) is LeaseState.GRANTED
    world.sender.engine_is_well = False
    await world.wait(7)
    assert world.receiver.events[0] == ("failed", "r", LeaseFailure.EXPIRED)
    with pytest.raises(HandoffError, match="FENCED"):
        await world.sender.finish(handoff)


@pytest.mark.parametrize("world", [60.0], indirect=True)
async def test_what_is_being_finished_keeps_its_lease_whatever_becomes_of_the_engine(
    world: World,
) -> None:
    lease = world.grant([[1], [1]])
    handoff = world.sender.open(lease)
    await world.wait(3)
    world.sender.engine_is_well = False
    finishing = begin_finish(world, handoff)  # nothing is pushed
    await world.wait(20)
    assert world.receiver.table.state(lease.lease_id) is LeaseState.GRANTED
    cancelling = asyncio.create_task(world.sender.cancel(handoff))
    await world.wait(1)
    await asyncio.wait({finishing, cancelling})
    with pytest.raises(HandoffError, match="CANCELLED"):
        await finishing


async def test_a_handoff_that_is_over_renews_nothing(world: World) -> None:
    handoff = world.sender.open(world.grant([[1], [1]]))
    cancelling = asyncio.create_task(world.sender.cancel(handoff))
    await world.wait(1)
    await cancelling
    assert world.receiver.event_names() == ["failed", "quiescent"]
    world.scheduler.run_all()
    world.clock.advance(30)
    assert world.scheduler.pending == []


async def test_the_ack_timeout_counts_from_the_last_flush_that_ended_not_from_the_first_token(
    world: World,
) -> None:
    """Several prompts on a slow link: each waits for those before it."""
    finishing = []
    for number in range(1, 5):
        handoff = world.sender.open(world.grant([[number], [number]], f"r{number}"))
        world.push_all(handoff, [number])
        finishing.append(begin_finish(world, handoff))
    await asyncio.sleep(0)
    for number, task in enumerate(finishing):
        await world.wait(2, without=("flush",))  # 3 a prompt, of the 4 that the timeout lasts
        assert not any(task.done() for task in finishing[number:])
        world.run_flush()
        await world.wait(1, without=("flush",))
        assert isinstance(await task, Receipt)


async def test_what_no_longer_moves_ends_in_a_timeout_whatever_moves_for_others(
    world: World,
) -> None:
    tasks = []
    for number in (1, 2):
        handoff = world.sender.open(world.grant([[number], [number]], f"r{number}"))
        if number == 1:  # of the second nothing is ever pushed
            world.push_all(handoff, [number])
        tasks.append(begin_finish(world, handoff))
    await world.wait(3, without=("flush",))
    world.run_flush()
    await world.wait(2)
    assert isinstance(await tasks[0], Receipt)
    with pytest.raises(HandoffError, match="TIMEOUT"):
        await tasks[1]
