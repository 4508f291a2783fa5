"""Peers and connections that are lost, puts that fail or land late, ranks that never drain."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from handoff_pairs import THERE
from manual_world import CONFIG, World, begin_finish, finished

from kv_transfer.errors import HandoffError, Reason
from kv_transfer.lease import Lease, Receipt
from kv_transfer.lease_table import LeaseFailure, LeaseState


async def test_late_puts_of_a_dead_writer_find_their_blocks_in_quarantine(world: World) -> None:
    lease = world.grant([[1, 2], [1, 2]])
    handoff = world.sender.open(lease)
    await world.settle()
    world.push_all(handoff, [3, 4])
    address = world.sender.transports[0].address
    world.network.kill(address)
    world.scheduler.run_all(("lost",))
    await world.deliver()
    assert world.receiver.events == [("failed", "r", LeaseFailure.WRITER_LOST)]
    assert world.receiver.table.state(lease.lease_id) is LeaseState.QUARANTINED
    await world.advance(30)  # however long: it is not reaped
    assert world.receiver.table.num_quarantined_blocks == 4
    world.scheduler.run_all(("put",))  # they land
    assert world.receiver.count_wrong_bytes(THERE) > 0
    with pytest.raises(AssertionError, match="another lease"):
        world.grant([[2], [2]], "other")
    world.network.reap(address)
    world.sender_is_gone = True
    await world.advance(2)
    assert world.receiver.event_names() == ["failed", "quiescent"]
    world.dead.add("sender")


def lose_rank_1(world: World) -> bytes:
    """Of the sender, whose rank 0 lives on; everyone who is connected to it notices."""
    address = world.sender.transports[1].address
    world.network.kill(address)
    world.scheduler.run_all(("lost",))
    return address


async def test_a_rank_lost_in_mid_push_ends_the_handoff_and_leaves_blocks_in_quarantine() -> None:
    world = World(sender_tp=2)
    lease = world.grant([[1, 2], [1, 2]])
    handoff = world.sender.open(lease)
    await world.settle()
    broken = []
    world.sender.exporter.on_broken = lambda name, error: broken.append((name, error.reason))
    world.push_all(handoff, [3, 4])
    finishing = begin_finish(world, handoff)
    await world.deliver()
    lost = lose_rank_1(world)
    await world.deliver()
    assert broken == [(handoff, Reason.RANK_LOST)]  # at once
    world.scheduler.run_all(("flush", "message"))
    await world.advance(CONFIG.ack_timeout_s)
    with pytest.raises(HandoffError, match="RANK_LOST"):  # no fault of the receiver's
        await finishing
    assert not await world.sender.exporter.cancel(handoff)  # so its own blocks are not free either
    for _ in range(30):  # however long, and however often it is fenced
        await world.advance(1)
        world.scheduler.run_all(("flush", "message"))
        await world.deliver()
    assert world.receiver.event_names() == ["failed"]
    assert world.receiver.table.num_quarantined_blocks == 4
    world.scheduler.run_all(("put",))  # what the lost rank has posted lands
    assert world.receiver.count_wrong_bytes(THERE) > 0
    world.network.kill(world.sender.transports[0].address)
    for address in (lost, world.sender.transports[0].address):
        world.network.reap(address)
    world.sender_is_gone = True
    await world.advance(30)
    assert world.receiver.event_names() == ["failed", "quiescent"]
    assert world.receiver.leftovers() == (0, 0, 0)
    assert world.receiver.table.num_quarantined_blocks == 0
    world.receiver.check_integrity()


async def test_a_rank_lost_after_it_had_drained_leaves_nothing_in_quarantine() -> None:
    world = World(sender_tp=2)
    handoff = world.sender.open(world.grant([[1], [1]]))
    await world.settle()
    world.push_all(handoff, [3])
    await world.settle()  # rank 0 waits for the first token
    lose_rank_1(world)
    await world.settle()
    with pytest.raises(HandoffError, match="RANK_LOST"):  # no fault of the receiver's
        await world.sender.finish(handoff)
    await world.settle()
    assert world.receiver.event_names() == ["failed", "quiescent"]
    assert world.receiver.table.num_quarantined_blocks == 0
    for side in (world.sender, world.receiver):
        side.check_integrity()
        assert side.leftovers() == (0, 0, 0)


async def test_mail_without_a_reader_is_not_kept(world: World) -> None:
    two = World(sender_tp=2)
    mails = [mail for rank in two.sender.ranks for mail in (rank.exporter_mail, rank.lease_mail)]
    for number in range(5):
        two.sender.transports[1].connect(b"gone-%d" % number)
    await two.settle()
    assert [mail.num_waiting for mail in mails] == [0, 0, 0, 0]


async def test_a_lost_receiver_breaks_the_handoff_and_is_reported_at_once(world: World) -> None:
    handoff = world.sender.open(world.grant([[1], [1]]))
    await world.settle()
    broken = []
    world.sender.exporter.on_broken = lambda name, error: broken.append((name, error.reason))
    world.network.kill(world.receiver.transports[0].address)
    await world.settle()
    assert broken == [(handoff, Reason.PEER_LOST)]
    with pytest.raises(HandoffError, match="PEER_LOST"):
        await world.sender.finish(handoff)
    world.dead.add("receiver")


async def test_a_failed_post_fails_its_own_handoff_and_no_other(
    world: World,
) -> None:
    failing = world.sender.open(world.grant([[1], [1]], "failing"))
    other = world.sender.open(world.grant([[2], [2]], "other"))
    await world.settle()
    memory: Any = world.receiver.memories[0]
    kept, memory.regions = memory.regions, ()
    world.push_all(failing, [3])
    await world.settle()
    memory.regions = kept
    world.push_all(other, [4])
    assert isinstance(await finished(world, begin_finish(world, other)), Receipt)
    with pytest.raises(HandoffError, match=r"POST_FAILED.*rkey"):
        await finished(world, begin_finish(world, failing))
    assert [event[:2] for event in world.receiver.events] == [
        ("failed", "failing"),  # at once: no receiver waits for the rest of a prompt in vain
        ("quiescent", "failing"),
        ("admitted", "other"),
    ]


async def test_a_rank_that_never_drains_delays_no_caller_for_ever_and_frees_nothing() -> None:
    world = World(sender_tp=2)
    handoff = world.sender.open(world.grant([[1], [1]]))
    await world.settle()
    world.sender.push(handoff, 0, [0], [3])  # half of it: rank 1 has more to do
    cancelling = asyncio.create_task(world.sender.exporter.cancel(handoff))
    await world.deliver()

    def lose_cancels() -> None:
        for cancel in world.messages("rank_cancel"):
            world.scheduler.drop(cancel)

    lose_cancels()
    await world.settle()
    await world.advance(5)
    lose_cancels()
    assert not await cancelling  # bounded, and False: nothing is proved
    draining = asyncio.create_task(world.sender.exporter.wait_drained(handoff))
    await world.settle()
    await world.advance(10)
    lose_cancels()
    await world.settle()
    assert world.receiver.events == [("failed", "r", LeaseFailure.EXPIRED)]
    assert world.receiver.table.num_quarantined_blocks == 2
    assert not draining.done()
    await world.advance(1)  # a repeated cancel reaches the rank
    await world.settle()
    assert draining.done()
    await world.advance(10)
    await world.settle()
    assert world.receiver.event_names()[-1] == "quiescent"
    assert world.sender.leftovers() == (0, 0, 0)


async def broken_in_mid_push(sender_tp: int, receiver_tp: int = 1) -> tuple[World, Lease]:
    """Over TCP: the puts of a handoff are on their way, and its sender knows that they broke."""
    world = World(sender_tp, receiver_tp, puts_outlive_connection=True)
    lease = world.grant([[1], [1]])
    handoff = world.sender.open(lease)
    await world.settle()
    world.push_all(handoff, [3])
    finishing = begin_finish(world, handoff)
    await world.deliver()
    world.break_connection(world.sender, sender_tp - 1, world.receiver)
    world.scheduler.run_all(("lost",))
    await world.deliver()
    world.scheduler.run_all(("flush", "message"))
    await world.deliver()
    with pytest.raises(HandoffError, match="PEER_LOST"):
        await finishing
    world.scheduler.run_all(("flush", "message"))
    await world.deliver()
    return world, lease


@pytest.mark.parametrize("sender_tp", [1, 2])
async def test_blocks_stay_in_quarantine_while_a_broken_connection_can_still_deliver(
    sender_tp: int,
) -> None:
    world, lease = await broken_in_mid_push(sender_tp)
    for _ in range(3):  # fences are answered, but puts are not revoked yet
        await world.advance(10)
        world.scheduler.run_all(("flush", "message"))
        await world.deliver()
    assert world.receiver.event_names() == ["failed"]
    assert world.receiver.table.state(lease.lease_id) is LeaseState.QUARANTINED
    assert world.receiver.count_wrong_bytes(THERE) == 0
    world.scheduler.run_all(("put",))
    assert world.receiver.count_wrong_bytes(THERE) > 0  # they land where no other writes
    with pytest.raises(AssertionError, match="another lease"):
        world.grant([[1], [2]], "other")


@pytest.mark.parametrize("receiver_tp", [1, 2])
async def test_what_every_rank_has_revoked_never_lands_and_its_blocks_are_free(
    receiver_tp: int,
) -> None:
    world, lease = await broken_in_mid_push(1, receiver_tp)
    await world.advance(10)
    world.scheduler.run_all(("revoke",))  # at rank 0; the other has yet to hear of it
    await world.deliver()
    assert (world.receiver.event_names() == ["failed"]) == (receiver_tp == 2)
    world.scheduler.run_all(("message", "revoke"))
    early = world.grant([[7], [7]], "early")  # names the new addresses, before the table hears
    await world.deliver()
    assert world.receiver.event_names() == ["failed", "quiescent"]
    assert world.receiver.table.state(early.lease_id) is LeaseState.GRANTED
    again = world.grant([[1], [1]], "again")
    assert {rank.put_address for rank in again.ranks}.isdisjoint(r.put_address for r in lease.ranks)
    world.scheduler.run_all(("put",))
    assert world.receiver.count_wrong_bytes(THERE) == 0
    handoff = world.sender.open(again)
    await world.settle()
    world.push_all(handoff, [4])
    assert isinstance(await finished(world, begin_finish(world, handoff)), Receipt)
    assert world.receiver.release(early.lease_id)
    await world.settle()
    for side in (world.sender, world.receiver):
        side.check_integrity()
        assert side.leftovers() == (0, 0, 0)


async def test_other_open_leases_fail_typed_when_puts_are_revoked_and_admitted_ones_stay() -> None:
    world, _ = await broken_in_mid_push(1)
    handoff = world.sender.open(world.grant([[5], [5]], "admitted"))
    world.grant([[6], [6]], "open")
    world.push_all(handoff, [4])
    finishing = begin_finish(world, handoff)
    for _ in range(9):
        await world.deliver()
        world.scheduler.run_all(("put", "flush", "message", "lost"))
    assert isinstance(await finishing, Receipt)
    await world.advance(3)
    await world.settle()
    assert [event[:2] for event in world.receiver.events] == [
        ("failed", "r"),
        ("admitted", "admitted"),
        ("quiescent", "r"),
        ("failed", "open"),
        ("quiescent", "open"),
    ]
    world.receiver.check_integrity()


async def test_a_connection_that_breaks_before_anything_was_pushed_strands_no_blocks() -> None:
    world = World(puts_outlive_connection=True)
    handoff = world.sender.open(world.grant([[1], [1]]))
    await world.settle()
    world.break_connection(world.sender, 0, world.receiver)
    await world.settle()
    with pytest.raises(HandoffError, match="PEER_LOST"):
        await world.sender.finish(handoff)
    await world.settle()
    assert world.receiver.event_names() == ["failed", "quiescent"]
    assert world.receiver.table.num_quarantined_blocks == 0


async def test_a_rank_that_has_lost_its_rank_0_once_still_reaches_it() -> None:
    world = World(sender_tp=2, receiver_tp=2)
    handoff = world.sender.open(world.grant([[1], [1]]))
    await world.settle()
    for side in (world.sender, world.receiver):
        world.break_connection(side, 1, side)
    await world.settle()
    world.push_all(handoff, [3])
    assert isinstance(await finished(world, begin_finish(world, handoff)), Receipt)
    assert world.receiver.event_names() == ["admitted"]
