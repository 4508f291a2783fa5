"""Messages that are lost or overtaken, in an order that only a network run by hand can keep."""

from __future__ import annotations

import pytest
from handoff_pairs import THERE
from manual_world import World, begin_finish

from kv_transfer.errors import FencedError, HandoffTimeoutError, LeaseFencedError
from kv_transfer.lease import Receipt


async def test_a_lost_ack_is_made_good_by_repeating_the_done(world: World) -> None:
    handoff = world.sender.open(world.grant([[1], [1]]))
    world.push_all(handoff, [3])
    finishing = begin_finish(world, handoff)
    await world.deliver()
    world.scheduler.drop(await world.run_until_message("ack"))
    await world.settle()
    assert world.receiver.event_names() == ["admitted"]
    assert not finishing.done()
    await world.advance(1.5)  # a quarter of the timeout and a bit
    await world.settle()
    assert isinstance(await finishing, Receipt)
    assert world.receiver.event_names() == ["admitted"]


async def test_a_lost_done_is_repeated(world: World) -> None:
    handoff = world.sender.open(world.grant([[1], [1]]))
    world.push_all(handoff, [3])
    finishing = begin_finish(world, handoff)
    await world.deliver()
    world.scheduler.drop(await world.run_until_message("done"))
    await world.advance(1.5)
    await world.settle()
    assert (await finishing).num_blocks == 2


async def test_a_receiver_that_never_answers_ends_in_a_timeout_and_keeps_what_it_admitted(
    world: World,
) -> None:
    handoff = world.sender.open(world.grant([[1], [1]]))
    world.push_all(handoff, [3])
    finishing = begin_finish(world, handoff)
    await world.deliver()
    for _ in range(8):
        world.scheduler.run_all(("put", "flush"))
        for done in world.messages("done"):
            world.scheduler.run(done)
        await world.deliver()
        for ack in world.messages("ack"):
            world.scheduler.drop(ack)
        await world.advance(0.5)
    with pytest.raises(HandoffTimeoutError):
        await finishing
    await world.settle()  # its `failed` and `drained` come to a lease that is admitted
    assert world.receiver.event_names() == ["admitted"]


async def test_a_fence_overtakes_the_opening_and_the_engine_is_told_nothing_new(
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
    with pytest.raises(FencedError):
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
    with pytest.raises(LeaseFencedError):
        world.sender.open(lease)
