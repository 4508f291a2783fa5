"""Two workers over the in-memory twin, of which nothing moves by itself.

Operations run when the test says so, in the order it says, and time stands still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from handoff_pairs import HERE, THERE
from transfer_sides import LAYOUT, Side, SideSpec

from baton.clock import ManualClock
from baton.config.transfer import TransferConfig
from baton.v1 import transfer_pb2
from kv_transfer.layout import KvLayout
from kv_transfer.lease import Lease, Receipt
from kv_transfer.process import ProcessIdentity
from kv_transfer.transports.memory_transport import MemoryNetwork, Operation

CONFIG = TransferConfig(transport="memory", renew_within_s=5, ack_timeout_s=4, tombstone_s=100)


EVERY_KIND = ("put", "flush", "message", "lost", "revoke")


class ManualScheduler:
    """Run nothing by itself. `pending` is in the order of the calls."""

    def __init__(self) -> None:
        self.pending: list[Operation] = []

    def schedule(self, operation: Operation) -> None:
        self.pending.append(operation)

    def discard(self, unwanted: Callable[[Operation], bool]) -> None:
        self.pending = [operation for operation in self.pending if not unwanted(operation)]

    def run(self, operation: Operation) -> None:
        self.pending.remove(operation)
        operation.run()

    def drop(self, operation: Operation) -> None:
        self.pending.remove(operation)

    def run_all(self, kinds: tuple[str, ...] = EVERY_KIND) -> int:
        """Run pending operations of these kinds, and what they cause; returns how many ran."""
        ran = 0
        while chosen := next((o for o in self.pending if o.kind in kinds), None):
            self.run(chosen)
            ran += 1
        return ran


class World:
    """A sender and a receiver over a network that the test runs by hand."""

    def __init__(
        self,
        sender_tp: int = 1,
        receiver_tp: int = 1,
        puts_outlive_connection: bool = False,
        config: TransferConfig = CONFIG,
        layout: KvLayout = LAYOUT,
    ) -> None:
        self.config, self.layout = config, layout
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
        spec = SideSpec(name, tp_size, self.layout, self.config)
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

    async def wait(self, seconds: int, without: tuple[str, ...] = ()) -> None:
        """Let time pass while everything moves but operations of the kinds `without`."""
        kinds = tuple(kind for kind in ("put", "flush", "message") if kind not in without)
        for _ in range(4 * seconds):
            self.clock.advance(0.25)
            self.scheduler.run_all(kinds)
            await asyncio.sleep(0)  # what has arrived is read

    def run_flush(self) -> None:
        """End the oldest flush."""
        self.scheduler.run(next(o for o in self.scheduler.pending if o.kind == "flush"))

    async def run_until_message(self, kind: str) -> Operation:
        """Run what is pending, in order, up to the first message of a kind, which stays pending."""
        while not (found := self.messages(kind)):
            assert self.scheduler.pending, f"no {kind} comes"
            self.scheduler.run(self.scheduler.pending[0])
            await self.deliver()
        return found[0]


def begin_finish(world: World, handoff: Any) -> Any:
    return asyncio.create_task(world.sender.finish(handoff))


async def in_flight(world: World, lease: Lease | None = None) -> tuple[Any, Any]:
    """(handoff, the task that finishes it): all is pushed, and nothing has moved yet."""
    handoff = world.sender.open(lease or world.grant([[1], [1]]))
    world.push_all(handoff, [3])
    finishing = begin_finish(world, handoff)
    await world.deliver()
    return handoff, finishing


async def finished(world: World, task: asyncio.Task[Receipt]) -> Receipt:
    await world.settle()
    return await task
