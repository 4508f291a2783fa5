"""Leases and handoffs under any order of calls, deliveries, losses, pauses and one death.

The model is the pool of the receiver: who owns each block, and what it must contain. A block that
is free, or that was admitted, must never change; at the end every block is free again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import hypothesis.strategies as st
import numpy.typing as npt
from handoff_pairs import HERE, THERE
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from manual_world import EVERY_KIND, World
from transfer_sides import BLOCKS_PER_REGION, NUM_BLOCKS, ONE_HEAD, pool_content

from baton.config.transfer import TransferConfig
from kv_transfer.errors import HandoffError, LeaseError
from kv_transfer.layout import HandoffId, RegionLayout
from kv_transfer.lease import Lease
from kv_transfer.transports.memory_transport import Operation

CONFIG = TransferConfig(transport="memory", renew_within_s=6, ack_timeout_s=4, tombstone_s=1000)


@dataclass
class Request:
    lease: Lease
    blocks: list[int]
    state: str = "granted"  # granted | quarantined | admitted | gone
    handoff: HandoffId | None = None
    sources: dict[int, int] = field(default_factory=dict)  # ordinal -> block pushed
    finishing: asyncio.Task[Any] | None = None
    cancelling: asyncio.Task[Any] | None = None


class Handoffs(RuleBasedStateMachine):
    over_tcp = False

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.requests: dict[str, Request] = {}
        self.seen_events = 0
        self.is_dead = False
        self.run(self._begin())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def and_deliver() -> Any:
            result = await work
            for _ in range(4):
                await asyncio.sleep(0)
            return result

        result = self.loop.run_until_complete(and_deliver())
        self._take_events()
        return result

    async def _begin(self) -> None:
        self.world = World(config=CONFIG, layout=ONE_HEAD, puts_outlive_connection=self.over_tcp)
        self.scheduler, self.clock = self.world.scheduler, self.world.clock
        self.sender, self.receiver = self.world.sender, self.world.receiver

    def _take_events(self) -> None:
        """Do what the owner of the blocks does with the events of its table."""
        if not hasattr(self, "receiver"):
            return
        new, self.seen_events = (
            self.receiver.events[self.seen_events :],
            len(self.receiver.events),
        )
        for name, request_id, *_ in new:
            request = self.requests[request_id]
            if name == "admitted":
                assert request.state == "granted", (name, request)
                assert set(request.sources) == set(range(len(request.blocks))), request
                request.state = "admitted"
            elif name == "failed":
                assert request.state == "granted", (name, request)
                request.state = "quarantined"
            else:
                assert request.state == "quarantined", (name, request)
                self._free(request)

    def _free(self, request: Request) -> None:
        """The blocks are anyone's: refill them, so that a late write shows."""
        request.state = "gone"
        for block in request.blocks:
            for part, content in zip(self._parts(block), self._content(THERE[block])):
                part[:] = content

    def _expected(self) -> list[int]:
        seeds = list(THERE)
        for request in self.requests.values():
            if request.state == "admitted":
                for ordinal, block in enumerate(request.blocks):
                    seeds[block] = HERE[request.sources[ordinal]]
        return seeds

    def _in_flux(self) -> set[int]:
        states = ("granted", "quarantined")
        return {b for r in self.requests.values() if r.state in states for b in r.blocks}

    def _pick(self, data: st.DataObject, *states: str) -> Request | None:
        found = [r for r in self.requests.values() if r.state in states]
        return data.draw(st.sampled_from(found)) if found else None

    # --- calls -----------------------------------------------------------------------------------

    @rule(count=st.integers(1, 3), seed=st.randoms(use_true_random=False))
    def grant(self, count: int, seed: Any) -> None:
        used = {b for r in self.requests.values() if r.state != "gone" for b in r.blocks}
        free = [b for b in range(1, NUM_BLOCKS) if b not in used]
        if len(free) < count or len(self.requests) > 8:
            return
        blocks = seed.sample(free, count)
        name = f"r{len(self.requests)}"
        lease = self.run(self._call(self.receiver.grant, name, self.sender.identity, [blocks]))
        self.requests[name] = Request(lease, blocks)

    @precondition(lambda self: not self.is_dead)
    @rule(data=st.data(), count=st.integers(1, 3), seed=st.randoms(use_true_random=False))
    def grant_open_and_push(self, data: st.DataObject, count: int, seed: Any) -> None:
        """Deep states in one step: all is posted, nothing has moved."""
        before = len(self.requests)
        self.grant(count, seed)
        if len(self.requests) == before:
            return
        request = list(self.requests.values())[-1]
        request.handoff = self.run(self._call(self.sender.open, request.lease))
        ordinals = list(range(len(request.blocks)))[data.draw(st.sampled_from([0, 0, 0, 1])) :]
        sources = [data.draw(st.integers(1, NUM_BLOCKS - 1)) for _ in ordinals]
        request.sources.update(zip(ordinals, sources))
        self.run(self._call(self.sender.push, request.handoff, 0, ordinals, sources))
        if data.draw(st.booleans()):
            self.run(self._finish(request))

    @staticmethod
    async def _call(function: Any, *args: Any) -> Any:
        return function(*args)

    @precondition(lambda self: not self.is_dead)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        request = self._pick(data, "granted", "quarantined", "gone")
        if request is None:
            return
        try:
            handoff = self.run(self._call(self.sender.open, request.lease))
        except LeaseError:
            return
        assert request.handoff is None
        request.handoff = handoff

    @precondition(lambda self: not self.is_dead)
    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        found = [r for r in self.requests.values() if r.handoff is not None]
        if not found:
            return
        request = data.draw(st.sampled_from(found))
        left = [o for o in range(len(request.blocks)) if o not in request.sources]
        if not left:
            return
        ordinals = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        sources = [data.draw(st.integers(1, NUM_BLOCKS - 1)) for _ in ordinals]
        request.sources.update(zip(ordinals, sources))
        self.run(self._call(self.sender.push, request.handoff, 0, ordinals, sources))

    @precondition(lambda self: not self.is_dead)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        found = [r for r in self.requests.values() if r.handoff and not r.finishing]
        if found:
            self.run(self._finish(data.draw(st.sampled_from(found))))

    async def _finish(self, request: Request) -> None:
        assert request.handoff is not None
        request.finishing = asyncio.create_task(self.sender.finish(request.handoff))

    @precondition(lambda self: not self.is_dead)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        found = [r for r in self.requests.values() if r.handoff and not r.cancelling]
        if found:
            self.run(self._cancel(data.draw(st.sampled_from(found))))

    async def _cancel(self, request: Request) -> None:
        assert request.handoff is not None
        request.cancelling = asyncio.create_task(self.sender.cancel(request.handoff))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = self._pick(data, "granted", "admitted", "quarantined")
        if request is None:
            return
        writable = self.run(self._call(self.receiver.release, request.lease.lease_id))
        assert writable == (request.state == "granted"), request
        if writable:
            request.state = "quarantined"
        elif request.state == "admitted":
            self._free(request)

    @rule(data=st.data())
    def release_and_wait(self, data: st.DataObject) -> None:
        """While puts are still on their way: nothing may be freed by time alone."""
        self.release(data)
        self.wait(1.0)

    # --- the network and time --------------------------------------------------------------------

    def _choices(self) -> list[Operation]:
        """Messages in any order; puts and flushes in the order they were asked for."""
        first = next((o for o in self.scheduler.pending if o.kind in ("put", "flush")), None)
        others = [o for o in self.scheduler.pending if o.kind in ("message", "lost", "revoke")]
        return others + ([first] if first else [])

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, 4))):
            choices = self._choices()
            if choices:
                chosen = data.draw(st.integers(0, len(choices) - 1))
                self.run(self._call(self.scheduler.run, choices[chosen]))

    @rule(only_messages=st.booleans())
    def deliver_all(self, only_messages: bool) -> None:
        kinds = ("message",) if only_messages else EVERY_KIND
        self.run(self._call(self.scheduler.run_all, kinds))

    @rule(data=st.data())
    def lose_a_message(self, data: st.DataObject) -> None:
        messages = [o for o in self.scheduler.pending if o.kind == "message"]
        if messages:
            self.scheduler.drop(data.draw(st.sampled_from(messages)))

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 7.0]))
    def wait(self, seconds: float) -> None:
        self.run(self._call(self.clock.advance, seconds))

    @precondition(lambda self: not self.is_dead and len(self.requests) >= 2)
    @rule(noticed=st.booleans())
    def kill_the_sender(self, noticed: bool) -> None:
        self.is_dead = True
        self.run(self._call(self.world.network.kill, self.sender.transports[0].address, noticed))

    @precondition(lambda self: self.is_dead and not self.world.sender_is_gone)
    @rule()
    def reap_the_sender(self) -> None:
        if not self.over_tcp:  # else its kernel may deliver even now
            self.world.network.reap(self.sender.transports[0].address)
        self.world.sender_is_gone = True

    # --- what must hold --------------------------------------------------------------------------

    @invariant()
    def no_block_is_writable_by_two_and_no_final_block_changes(self) -> None:
        self.receiver.check_integrity()
        expected, flux = self._expected(), self._in_flux()
        for block in set(range(NUM_BLOCKS)) - flux:
            for part, wanted in zip(self._parts(block), self._content(expected[block])):
                assert (part == wanted).all(), f"block {block} has changed"

    def _parts(self, block: int) -> list[npt.NDArray[Any]]:
        """Views of a block of the receiver's pool, one per layer."""
        layout, memory = self.receiver.layouts[0], self.receiver.memories[0]
        region, row = divmod(block, layout.num_blocks)
        tensor = ONE_HEAD.groups[0].tensors[0]
        num_bytes = layout.tensor_block_bytes(tensor)
        starts = (
            region * memory.region_stride_bytes + layout.tensor_offset(layer, "k") + row * num_bytes
            for layer in (0, 1)
        )
        return [memory.buffer[start : start + num_bytes] for start in starts]

    @staticmethod
    @cache
    def _content(seed: int) -> list[npt.NDArray[Any]]:
        """What a block of that seed holds, per layer."""
        layout = RegionLayout(ONE_HEAD, 0, 1, BLOCKS_PER_REGION)
        stride = layout.num_bytes()
        pool = pool_content(layout, stride, [seed])
        num_bytes = layout.tensor_block_bytes(ONE_HEAD.groups[0].tensors[0])
        starts = [layout.tensor_offset(layer, "k") for layer in (0, 1)]
        return [pool[start : start + num_bytes] for start in starts]

    def teardown(self) -> None:
        try:
            self._end_well()
        finally:
            self.loop.run_until_complete(self._drop_tasks())
            self.loop.close()

    def _end_well(self) -> None:
        if self.is_dead and not self.world.sender_is_gone:
            self.reap_the_sender()
        if not self.is_dead:
            for request in self.requests.values():
                if request.handoff and not request.finishing and not request.cancelling:
                    self.run(self._cancel(request))
        for request in self.requests.values():
            if request.state == "granted":
                self.run(self._call(self.receiver.release, request.lease.lease_id))
                request.state = "quarantined"
        late = ("message", "lost", "revoke")  # and what was put lands last
        for kinds in (*[late] * 6, *[EVERY_KIND] * 12):
            self.run(self._call(self.scheduler.run_all, kinds))
            self.run(self._call(self.clock.advance, 1.0))
        states = {name: request.state for name, request in self.requests.items()}
        assert set(states.values()) <= {"admitted", "gone"}, states
        self.no_block_is_writable_by_two_and_no_final_block_changes()
        assert self.receiver.leftovers() == (0, 0, 0)
        assert self.receiver.table.num_quarantined_blocks == 0
        if not self.is_dead:
            self._check_sender()

    def _check_sender(self) -> None:
        assert self.sender.leftovers() == (0, 0, 0)
        for request in self.requests.values():
            if request.finishing is not None:
                assert request.finishing.done(), request
                error = request.finishing.exception()
                assert error is None or isinstance(error, HandoffError), error

    async def _drop_tasks(self) -> None:
        for request in self.requests.values():
            for task in (request.finishing, request.cancelling):
                if task is not None:
                    task.cancel()
                    await asyncio.wait([task])
                    if not task.cancelled():
                        task.exception()


class HandoffsOverTcp(Handoffs):
    """What was put may land however long its connection or its writer is gone, until it is
    revoked."""

    over_tcp = True

    @precondition(lambda self: not self.is_dead and self.requests)
    @rule()
    def break_the_connection(self) -> None:
        self.world.break_connection(self.sender, 0, self.receiver)


SETTINGS = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestHandoffs = Handoffs.TestCase
TestHandoffsOverTcp = HandoffsOverTcp.TestCase
TestHandoffs.settings = TestHandoffsOverTcp.settings = SETTINGS
