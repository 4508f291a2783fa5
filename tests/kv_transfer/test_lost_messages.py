"""Lost and late messages, and the end of a lease's time."""

from __future__ import annotations

import asyncio

import pytest
from handoff_pairs import THERE
from manual_world import CONFIG, World, begin_finish, finished, in_flight

from kv_transfer.errors import HandoffError, LeaseServedError
from kv_transfer.lease import Receipt
from kv_transfer.lease_table import LeaseFailure, LeaseState


@pytest.mark.parametrize("lost", ["done", "ack"])
async def test_a_lost_done_or_ack_is_made_good_by_repeating_the_done(
    world: World, lost: str
) -> None:
    _, finishing = await in_flight(world)
    world.scheduler.drop(await world.run_until_message(lost))
    await world.settle()
    assert world.receiver.event_names() == ["admitted"] * (lost == "ack")
    assert not finishing.done()
    await world.advance(1.5)  # a quarter of the timeout and a bit
    await world.settle()
    assert (await finishing).num_blocks == 2
    assert world.receiver.event_names() == ["admitted"]


async def test_a_receiver_that_never_answers_ends_in_a_timeout_and_keeps_what_it_admitted(
    world: World,
) -> None:
    _, finishing = await in_flight(world)
    for _ in range(8):
        world.scheduler.run_all(("put", "flush"))
        for done in world.messages("done"):
            world.scheduler.run(done)
        await world.deliver()
        for ack in world.messages("ack"):
            world.scheduler.drop(ack)
        await world.advance(0.5)
    with pytest.raises(HandoffError, match="TIMEOUT"):
        await finishing
    await world.settle()  # its `failed` and `drained` come to a lease that is admitted
    assert world.receiver.event_names() == ["admitted"]


async def test_a_fence_overtakes_the_opening_and_the_engine_opens_nothing(
    world: World,
) -> None:
    lease = world.grant([[1], [1]])
    world.sender.sink_delay = []  # the engine has not begun its next step
    handoff = world.sender.open(lease)
    world.receiver.release(lease.lease_id)
    await world.settle()
    assert world.receiver.event_names() == ["quiescent"]
    for payload in world.sender.sink_delay:
        world.sender.ranks[0].message(payload)
    world.push_all(handoff, [3])
    await world.settle()
    with pytest.raises(HandoffError, match="FENCED"):
        await world.sender.finish(handoff)
    assert world.receiver.count_wrong_bytes(THERE) == 0


async def test_a_fence_that_is_lost_is_sent_again(world: World) -> None:
    lease = world.grant([[1], [1]])
    world.receiver.release(lease.lease_id)
    (fence,) = world.messages("fence")
    world.scheduler.drop(fence)
    await world.advance(1)
    await world.settle()
    assert world.receiver.event_names() == ["quiescent"]
    with pytest.raises(LeaseServedError, match="over"):
        world.sender.open(lease)


async def test_progress_does_not_carry_a_lease_past_its_deadline(world: World) -> None:
    tables = [[1, 2], [1, 2]]
    lease = world.receiver.table.grant("r", world.sender.identity, tables, 0, 8.0)  # type: ignore[arg-type]
    handoff = world.sender.open(lease)
    for ordinal in (0, 1):
        await world.advance(3)
        world.sender.push(handoff, 0, [ordinal], [5])
        await world.settle()
    await world.advance(3)
    assert world.receiver.events == [("failed", "r", LeaseFailure.EXPIRED)]
    await world.settle()
    await world.sender.cancel(handoff)


@pytest.mark.parametrize("world", [60.0], indirect=True)
async def test_a_done_that_comes_after_the_expiry_is_refused(world: World) -> None:
    _, finishing = await in_flight(world)
    await world.run_until_message("done")
    await world.advance(6)
    assert world.receiver.events == [("failed", "r", LeaseFailure.EXPIRED)]
    await world.settle()
    with pytest.raises(HandoffError, match="FENCED"):
        await finishing
    assert world.receiver.event_names() == ["failed", "quiescent"]


async def test_a_lease_released_after_its_ack_went_out_is_free_and_never_admitted(
    world: World,
) -> None:
    lease = world.grant([[1], [1]])
    _, finishing = await in_flight(world, lease)
    world.scheduler.run(await world.run_until_message("done"))  # decided; the loop has not heard
    assert world.messages("ack")
    assert world.receiver.release(lease.lease_id)
    assert world.receiver.events == []
    assert isinstance(await finished(world, finishing), Receipt)
    assert world.receiver.event_names() == ["quiescent"]


@pytest.mark.parametrize("world", [200.0], indirect=True)
@pytest.mark.parametrize("silence_s", [5.0, 70.0])
async def test_a_lease_whose_time_ends_after_its_ack_went_out_is_admitted(
    world: World, silence_s: float
) -> None:
    _, finishing = await in_flight(world)
    world.scheduler.run(await world.run_until_message("done"))
    world.clock.advance(silence_s)  # before the loop hears: nothing may take the Ack back
    assert isinstance(await finished(world, finishing), Receipt)
    assert world.receiver.event_names() == ["admitted"]


async def test_an_admitted_lease_is_kept_only_while_its_done_may_be_repeated(world: World) -> None:
    lease = world.grant([[1], [1]])
    handoff = world.sender.open(lease)
    world.push_all(handoff, [3])
    await finished(world, begin_finish(world, handoff))
    await world.advance(2 * CONFIG.ack_timeout_s - 1)
    assert world.receiver.table.state(lease.lease_id) is LeaseState.ADMITTED
    await world.advance(1)
    assert world.receiver.table.state(lease.lease_id) is None


# --- renewals: by time and the engine's state, not by what was pushed ---------------------------


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
