"""Faults that only the in-memory twin can order exactly: lost and late messages, late puts.

Nothing moves by itself here: operations run when the test says so, and time stands still.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from transfer_sides import LAYOUT, NUM_BLOCKS, Side, SideSpec

from baton.v1 import transfer_pb2
from kv_transfer.clock import ManualClock
from kv_transfer.config import TransferConfig
from kv_transfer.errors import (
    FencedError,
    HandoffTimeoutError,
    LeaseFencedError,
    PeerLostError,
    PostFailedError,
)
from kv_transfer.lease import Lease, Receipt
from kv_transfer.lease_table import LeaseFailure, LeaseState
from kv_transfer.memory_transport import ManualScheduler, MemoryNetwork, Operation
from kv_transfer.process import ProcessIdentity

CONFIG = TransferConfig(transport="memory", renew_within_s=5, ack_timeout_s=4, tombstone_s=100)
HERE, THERE = list(range(100, 100 + NUM_BLOCKS)), list(range(200, 200 + NUM_BLOCKS))


class World:
    """A sender and a receiver over a network that the test runs by hand."""

    def __init__(
        self, sender_tp: int = 1, receiver_tp: int = 1, puts_outlive_connection: bool = False
    ) -> None:
        self.scheduler = ManualScheduler()
        self.network = MemoryNetwork(self.scheduler, puts_outlive_connection)
        self.clock = ManualClock()
        self.sender_is_gone = False
        self.dead: set[str] = set()  # workers of which nothing is left to check
        self.sender = self._side("sender", sender_tp)
        self.receiver = self._side("receiver", receiver_tp)
        self.sender.fill(HERE)
        self.receiver.fill(THERE)

    def _side(self, name: str, tp_size: int) -> Side:
        spec = SideSpec(name, tp_size, LAYOUT, CONFIG)
        transports = [self.network.join() for _ in range(tp_size)]
        side = Side(spec, transports, self.clock, self._is_gone)
        self.scheduler.run_all()
        side.ready()
        return side

    def _is_gone(self, _process: ProcessIdentity) -> bool:
        return self.sender_is_gone

    def grant(self, blocks: list[list[int]], request_id: str = "r") -> Lease:
        return self.receiver.grant(request_id, self.sender.identity, blocks)

    def push_all(self, handoff: Any, sources: list[int]) -> None:
        for group in (0, 1):
            self.sender.push(handoff, group, list(range(len(sources))), sources)

    def break_connection(self, side: Side, rank: int, other: Side) -> None:
        """Of a rank to another worker's rank 0; both live."""
        transport = self.network.process(side.transports[rank].address)
        assert transport is not None
        transport.schedule_loss(other.transports[0].address)

    def messages(self, kind: str) -> list[Operation]:
        return [
            operation
            for operation in self.scheduler.pending
            if operation.kind == "message"
            and transfer_pb2.TransferMessage.FromString(operation.payload).WhichOneof("message")
            == kind
        ]

    async def deliver(self) -> None:
        """The event loop handles what has arrived."""
        for _ in range(5):
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Run everything until nothing is left to run."""
        await self.deliver()
        while self.scheduler.run_all():
            await self.deliver()

    async def advance(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / 0.5))):
            self.clock.advance(min(seconds, 0.5))
            await self.deliver()

    async def run_until_message(self, kind: str) -> Operation:
        """Run what is pending, in order, up to the first message of a kind, which stays pending."""
        while not (found := self.messages(kind)):
            assert self.scheduler.pending, f"no {kind} comes"
            self.scheduler.run(self.scheduler.pending[0])
            await self.deliver()
        return found[0]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.settle()
    await world.advance(20)
    await world.settle()
    await world.advance(2)
    for side in (world.sender, world.receiver):
        if side.spec.worker_id not in world.dead:
            side.check_integrity()
            assert side.leftovers() == (0, 0, 0), side.spec.worker_id
    if "receiver" not in world.dead:
        assert world.receiver.table.num_quarantined_blocks == 0


def begin_finish(world: World, handoff: Any, timeout_s: float | None = None) -> Any:
    return asyncio.create_task(world.sender.finish(handoff, timeout_s))


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
    await world.advance(30)  # however long: nobody has reaped it
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


async def test_a_renewal_that_is_heard_prolongs_the_lease_and_silence_ends_it(
    world: World,
) -> None:
    lease = world.grant([[1, 2, 3], [1, 2, 3]])
    handoff = world.sender.open(lease)
    for _ in range(4):
        await world.advance(4)
        await world.settle()
    assert world.receiver.events == []
    await world.advance(6)  # what is sent meanwhile does not arrive
    assert world.receiver.events == [("failed", "r", LeaseFailure.EXPIRED)]
    await world.settle()
    assert world.receiver.event_names() == ["failed", "quiescent"]
    with pytest.raises(FencedError):
        await world.sender.finish(handoff)


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


async def test_a_done_that_comes_after_the_expiry_is_refused(world: World) -> None:
    handoff = world.sender.open(world.grant([[1], [1]]))
    world.push_all(handoff, [3])
    finishing = begin_finish(world, handoff, 60.0)
    await world.deliver()
    await world.run_until_message("done")
    await world.advance(6)
    assert world.receiver.events == [("failed", "r", LeaseFailure.EXPIRED)]
    await world.settle()
    with pytest.raises(FencedError):
        await finishing
    assert world.receiver.event_names() == ["failed", "quiescent"]


async def test_a_lease_released_after_its_ack_went_out_is_free_and_never_admitted(
    world: World,
) -> None:
    lease = world.grant([[1], [1]])
    handoff = world.sender.open(lease)
    world.push_all(handoff, [3])
    finishing = begin_finish(world, handoff)
    await world.deliver()
    world.scheduler.run(await world.run_until_message("done"))  # decided; the loop has not heard
    assert world.messages("ack")
    assert world.receiver.release(lease.lease_id)
    assert world.receiver.events == []
    assert isinstance(await settled(world, finishing), Receipt)
    assert world.receiver.event_names() == ["quiescent"]


@pytest.mark.parametrize("silence_s", [5.0, 70.0])
async def test_a_lease_whose_time_ends_after_its_ack_went_out_is_admitted(
    world: World, silence_s: float
) -> None:
    handoff = world.sender.open(world.grant([[1], [1]]))
    world.push_all(handoff, [3])
    finishing = begin_finish(world, handoff, 200.0)
    await world.deliver()
    world.scheduler.run(await world.run_until_message("done"))
    world.clock.advance(silence_s)  # before the loop hears: nothing may take the Ack back
    assert isinstance(await settled(world, finishing), Receipt)
    assert world.receiver.event_names() == ["admitted"]


async def test_mail_that_nobody_reads_is_not_kept(world: World) -> None:
    two = World(sender_tp=2)
    mails = [mail for rank in two.sender.ranks for mail in (rank.exporter_mail, rank.lease_mail)]
    for number in range(5):
        two.sender.transports[1].connect(b"gone-%d" % number)
    await two.settle()
    assert [mail.num_waiting for mail in mails] == [0, 0, 0, 0]


async def test_a_lost_receiver_breaks_the_handoff_and_tells_the_role_at_once(world: World) -> None:
    handoff = world.sender.open(world.grant([[1], [1]]))
    await world.settle()
    broken = []
    world.sender.exporter.on_broken = lambda name, error: broken.append((name, type(error)))
    world.network.kill(world.receiver.transports[0].address)
    await world.settle()
    assert broken == [(handoff, PeerLostError)]
    with pytest.raises(PeerLostError):
        await world.sender.finish(handoff)
    world.dead.add("receiver")


async def test_an_rkey_that_is_revoked_ends_in_a_failed_post(world: World) -> None:
    lease = world.grant([[1], [1]])
    handoff = world.sender.open(lease)
    memory: Any = world.receiver.memories[0]
    kept, memory.regions = memory.regions, ()
    world.push_all(handoff, [3])
    finishing = begin_finish(world, handoff)
    await world.settle()
    with pytest.raises(PostFailedError, match="rkey"):
        await finishing
    memory.regions = kept
    assert world.receiver.event_names() == ["failed", "quiescent"]


async def test_a_failed_post_is_told_to_the_handoff_it_was_for_and_to_no_other(
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
    assert isinstance(await settled(world, begin_finish(world, other)), Receipt)
    with pytest.raises(PostFailedError, match="rkey"):
        await settled(world, begin_finish(world, failing))
    assert [event[:2] for event in world.receiver.events] == [
        ("failed", "failing"),  # at once: nobody waits for the rest of a prompt in vain
        ("quiescent", "failing"),
        ("admitted", "other"),
    ]


async def settled(world: World, task: asyncio.Task[Receipt]) -> Receipt:
    await world.settle()
    return await task


async def test_a_rank_that_never_drains_delays_nobody_for_ever_and_frees_nothing() -> None:
    world = World(sender_tp=2)
    handoff = world.sender.open(world.grant([[1], [1]]))
    await world.settle()
    world.sender.push(handoff, 0, [0], [3])  # half of it: rank 1 has more to do
    cancelling = asyncio.create_task(world.sender.exporter.cancel(handoff))
    await world.deliver()
    (cancel,) = world.messages("rank_cancel")
    world.scheduler.drop(cancel)
    await world.settle()
    await world.advance(5)
    assert not await cancelling  # bounded, and tells that nothing is proved
    draining = asyncio.create_task(world.sender.exporter.wait_drained(handoff))
    await world.settle()
    await world.advance(10)
    await world.settle()
    assert world.receiver.events == [("failed", "r", LeaseFailure.EXPIRED)]
    assert world.receiver.table.num_quarantined_blocks == 2
    assert not draining.done()
    cancel.run()  # the rank comes to
    await world.settle()
    assert draining.done()
    await world.advance(10)
    await world.settle()
    assert world.receiver.event_names()[-1] == "quiescent"
    assert world.sender.leftovers() == (0, 0, 0)


@pytest.mark.parametrize("sender_tp", [1, 2])
async def test_nobody_says_drained_while_a_broken_connection_can_still_deliver(
    sender_tp: int,
) -> None:
    world = World(sender_tp, puts_outlive_connection=True)
    lease = world.grant([[1], [1]])
    handoff = world.sender.open(lease)
    await world.settle()
    world.push_all(handoff, [3])
    finishing = begin_finish(world, handoff)
    await world.deliver()
    world.break_connection(world.sender, sender_tp - 1, world.receiver)
    world.scheduler.run_all(("lost",))
    await world.deliver()
    world.scheduler.run_all(("flush", "message"))  # the bytes are on their way yet
    await world.deliver()
    with pytest.raises(PeerLostError):
        await finishing
    world.scheduler.run_all(("flush", "message"))
    for _ in range(3):  # fences are answered, or not, all the same
        await world.advance(10)
        world.scheduler.run_all(("flush", "message"))
        await world.deliver()
    assert world.receiver.event_names() == ["failed"]
    assert world.receiver.table.state(lease.lease_id) is LeaseState.QUARANTINED
    assert world.receiver.count_wrong_bytes(THERE) == 0
    await world.settle()
    assert world.receiver.count_wrong_bytes(THERE) > 0  # they land where nobody else writes
    with pytest.raises(AssertionError, match="another lease"):
        world.grant([[1], [2]], "other")


async def test_a_connection_that_breaks_before_anything_was_pushed_strands_no_blocks() -> None:
    world = World(puts_outlive_connection=True)
    handoff = world.sender.open(world.grant([[1], [1]]))
    await world.settle()
    world.break_connection(world.sender, 0, world.receiver)
    await world.settle()
    with pytest.raises(PeerLostError):
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
    assert isinstance(await settled(world, begin_finish(world, handoff)), Receipt)
    assert world.receiver.event_names() == ["admitted"]


async def test_an_admitted_lease_is_kept_only_while_its_done_may_be_repeated(world: World) -> None:
    lease = world.grant([[1], [1]])
    handoff = world.sender.open(lease)
    world.push_all(handoff, [3])
    await settled(world, begin_finish(world, handoff))
    await world.advance(2 * CONFIG.ack_timeout_s - 1)
    assert world.receiver.table.state(lease.lease_id) is LeaseState.ADMITTED
    await world.advance(1)
    assert world.receiver.table.state(lease.lease_id) is None
