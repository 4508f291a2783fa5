"""Workers for the tests: all ranks of one worker, in this process or in one of their own.

A `Side` sends and receives. `LocalSide` and `RemoteSide` have one interface: a test does not
know where a worker runs or what moves its bytes.
"""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.clock import Clock
from baton.config.transfer import TransferConfig
from kv_transfer.exporter import Exporter
from kv_transfer.layout import (
    BlockId,
    BlockPush,
    HandoffId,
    KvLayout,
    LayerGroup,
    RegionLayout,
    TensorSpec,
    TokenLogprobs,
    kv_fingerprint,
)
from kv_transfer.lease import FirstToken, Lease, Receipt, WorkerIdentity
from kv_transfer.lease_table import LeaseFailure, LeaseTable
from kv_transfer.process import is_gone
from kv_transfer.rank import TransferRank
from kv_transfer.routes import RankPair
from kv_transfer.transport import TransferMemory, Transport
from kv_transfer.transports.by_name import make_transport

NUM_REGIONS, BLOCKS_PER_REGION = 3, 8
NUM_BLOCKS = NUM_REGIONS * BLOCKS_PER_REGION

LAYOUT = KvLayout(  # two groups, one windowed; grouped heads, and a latent that every rank holds
    block_size=4,
    groups=(
        LayerGroup(0, 2, (TensorSpec("k", 4, 8, "bfloat16"), TensorSpec("v", 4, 16, "bfloat16"))),
        LayerGroup(2, 3, (TensorSpec("latent", 1, 24, "float32"),), window=8),
    ),
)
ONE_HEAD = KvLayout(4, (LayerGroup(0, 2, (TensorSpec("k", 1, 8, "float32"),)),))


FIRST = FirstToken(7, TokenLogprobs(-0.5, 1, ((7, -0.5), (8, -1.5))))


@dataclass(frozen=True)
class SideSpec:
    worker_id: str
    tp_size: int = 1
    layout: KvLayout = LAYOUT
    config: TransferConfig = field(default_factory=TransferConfig)
    weights: str = "w"
    incarnation: int = 1
    device: str | None = None
    """Where torch allocates the pool, which the transport then registers; None: it allocates."""

    @property
    def fingerprint(self) -> bytes:
        return kv_fingerprint(self.layout, self.weights)


def pool_content(layout: RegionLayout, stride_bytes: int, seeds: Sequence[int]) -> npt.NDArray[Any]:
    """A rank's whole buffer when block b of every group holds the content of `seeds[b]`: bytes that
    depend on seed, block, layer, tensor and head, and on no rank. Shape [regions * stride]."""
    buffer = np.zeros(NUM_REGIONS * stride_bytes, dtype=np.uint8)
    for group in layout.layout.groups:
        for layer in range(group.first_layer, group.first_layer + group.num_layers):
            for index, tensor in enumerate(group.tensors):
                head_bytes = layout.layout.head_bytes(tensor)
                for block, seed in enumerate(seeds):
                    rng = np.random.default_rng((seed, layer, index))
                    heads = rng.integers(1, 256, (tensor.num_heads, head_bytes), dtype=np.uint8)
                    held = heads[list(tensor.heads_of_rank(layout.tp_rank, layout.tp_size))]
                    region, row = divmod(block, layout.num_blocks)
                    start = region * stride_bytes + layout.tensor_offset(layer, tensor.name)
                    start += row * layout.tensor_block_bytes(tensor)
                    buffer[start : start + held.size] = held.reshape(-1)
    return buffer


def make_pool(transport: Transport, layout: RegionLayout, device: str | None) -> TransferMemory:
    if device is None:
        return transport.allocate(NUM_REGIONS, layout.num_bytes(), BLOCKS_PER_REGION)
    import torch  # most tests' processes start sooner without it

    tensor = torch.zeros(NUM_REGIONS * layout.num_bytes(), dtype=torch.uint8, device=device)
    return transport.register(tensor, NUM_REGIONS, BLOCKS_PER_REGION)


class Side:
    """One worker: a `TransferRank` per rank, rank 0's exporter and lease table, and a stand-in for
    the engine that pushes what the test asks for. Made on a running event loop."""

    def __init__(
        self,
        spec: SideSpec,
        transports: Sequence[Transport],
        clock: Clock | None = None,
        process_is_gone: Any = is_gone,
    ) -> None:
        self.spec, self.transports = spec, transports
        self.layouts = [
            RegionLayout(spec.layout, rank, spec.tp_size, BLOCKS_PER_REGION)
            for rank in range(spec.tp_size)
        ]
        self.memories = [
            make_pool(transport, layout, spec.device)
            for transport, layout in zip(transports, self.layouts, strict=True)
        ]
        addresses = [TransferRank.address_of(t, rank) for rank, t in enumerate(transports)]
        self.identity = WorkerIdentity(spec.worker_id, spec.incarnation, tuple(addresses))
        self.ranks = [
            TransferRank(
                transport,
                self.memories[rank],
                self.layouts[rank],
                self.identity,
                spec.config,
                time.monotonic if clock is None else clock.now_s,
            )
            for rank, transport in enumerate(transports)
        ]
        self.events: list[tuple[Any, ...]] = []
        self.changed = asyncio.Event()
        self.sink_delay: list[bytes] | None = None
        self.table = LeaseTable(self.ranks[0], spec.fingerprint, self, clock, process_is_gone)
        self.engine_is_well = True
        self.exporter = Exporter(
            self.ranks[0],
            spec.fingerprint,
            lambda: self.engine_is_well,
            clock,
        )

    # --- the listener: what a decode worker implements

    def admitted(self, request_id: str, first: FirstToken) -> None:
        self._record(("admitted", request_id, first))

    def failed(
        self, request_id: str, reason: LeaseFailure, ended_by: FirstToken | None = None
    ) -> None:
        self._record(("failed", request_id, reason if ended_by is None else ended_by))

    def quiescent(self, request_id: str) -> None:
        self._record(("quiescent", request_id))

    def _record(self, event: tuple[Any, ...]) -> None:
        self.events.append(event)
        self.changed.set()

    def _to_sinks(self, payload: bytes) -> None:
        if self.sink_delay is not None:
            self.sink_delay.append(payload)
            return
        for rank in self.ranks:
            rank.message(payload)

    # --- what tests ask for; each is called by name, here or in another process

    def ready(self) -> WorkerIdentity:
        assert self.ranks[0].wait_ready(5)
        return self.identity

    def fill(self, seeds: list[int]) -> None:
        for layout, memory in zip(self.layouts, self.memories, strict=True):
            content = pool_content(layout, memory.region_stride_bytes, seeds)
            if isinstance(memory.buffer, np.ndarray):
                memory.buffer[:] = content
            else:
                memory.buffer.copy_(memory.buffer.new_tensor(content))

    def count_wrong_bytes(self, seeds: list[int]) -> int:
        return sum(
            int(
                np.count_nonzero(
                    np.concatenate(list(memory.read([(0, len(memory.buffer))])))
                    != pool_content(layout, memory.region_stride_bytes, seeds)
                )
            )
            for layout, memory in zip(self.layouts, self.memories, strict=True)
        )

    def flip_byte(self, rank: int, block: int) -> None:
        """Damage the first byte of a block's first tensor."""
        layout, memory = self.layouts[rank], self.memories[rank]
        region, row = divmod(block, layout.num_blocks)
        tensor = layout.layout.groups[0].tensors[0]
        offset = region * memory.region_stride_bytes + layout.tensor_offset(0, tensor.name)
        memory.buffer[offset + row * layout.tensor_block_bytes(tensor)] ^= 0xFF

    def grant(
        self, request_id: str, writer: WorkerIdentity, blocks: list[list[int]], cached: int = 0
    ) -> Lease:
        tables = [[BlockId(b) for b in table] for table in blocks]
        return self.table.grant(request_id, writer, tables, cached, 60.0)

    def release(self, lease_id: Any) -> bool:
        return self.table.release(lease_id)

    def open(self, lease: Lease) -> HandoffId:
        handoff = self.exporter.open(lease)
        self._to_sinks(self.exporter.opening(lease))
        return handoff

    def push(self, handoff: HandoffId, group: int, ordinals: list[int], blocks: list[int]) -> None:
        """One step of the engine on every rank: the blocks are written, layer after layer."""
        push = BlockPush(handoff, group, tuple(ordinals), tuple(BlockId(b) for b in blocks))
        spec = self.spec.layout.groups[group]
        for rank in self.ranks:
            for layer in range(spec.first_layer, spec.first_layer + spec.num_layers):
                rank.layer_done(layer, [push])
            rank.step_done()

    async def flush(self, lease: Lease) -> None:
        """Return when what rank 0 has pushed under a lease is in its owner's memory."""
        flushed, wake = asyncio.Event(), asyncio.get_running_loop().call_soon_threadsafe
        peer = self.transports[0].connect(lease.ranks[0].put_address)
        self.transports[0].flush(peer, lambda _: wake(flushed.set))
        await asyncio.wait_for(flushed.wait(), 10)

    async def finish(self, handoff: HandoffId) -> Receipt:
        return await self.exporter.finish(handoff, FIRST)

    async def cancel(self, handoff: HandoffId) -> None:
        await self.exporter.cancel(handoff)

    def replay_done(self, handoff: HandoffId, lease: Lease, changes: dict[str, Any]) -> None:
        """Send rank 0's `done` for a lease, made from its memory, with fields changed."""
        rank = self.ranks[0]
        message = rank.new_message(lease.lease_id, lease.lease_epoch)
        pair = RankPair(0, self.spec.tp_size, 0, len(lease.ranks))
        groups = range(len(lease.block_ids))
        done = message.done
        done.num_source_ranks, done.num_writer_ranks = 1, self.spec.tp_size
        done.num_blocks = sum(lease.num_writable_blocks(g) for g in groups)
        done.num_bytes = sum(
            lease.num_writable_blocks(g) * pair.block_bytes(self.spec.layout, g) for g in groups
        )
        done.kv_fingerprint = lease.kv_fingerprint
        done.first_token = 7
        for table in lease.block_ids:
            done.groups.add(block_ids=table)
        done.reply_to.CopyFrom(self.identity.ranks[0].to_proto())
        for name, value in changes.items():
            setattr(done if hasattr(done, name) else message, name, value)
        rank.send(lease.owner.rank0_address, message)

    async def wait_for(self, name: str, request_id: str, timeout_s: float = 10.0) -> Any:
        """The first recorded event of that kind and request."""
        async with asyncio.timeout(timeout_s):
            while True:
                for event in self.events:
                    if event[:2] == (name, request_id):
                        return event
                self.changed.clear()
                await self.changed.wait()

    def event_names(self) -> list[str]:
        return [event[0] for event in self.events]

    def check_integrity(self) -> None:
        self.table.check_integrity()
        self.exporter.check_integrity()

    async def rank_problems(self) -> list[str]:
        return await self.exporter.held_handoffs.problems()

    def leftovers(self) -> tuple[int, int, int]:
        """(open leases, open handoffs, handoffs that a rank still holds)."""
        held = sum(rank.num_open_handoffs() for rank in self.ranks)
        return self.table.num_open_leases(), self.exporter.num_open(), held

    def close(self) -> None:
        self.ranks.clear()
        self.memories.clear()
        for transport in reversed(self.transports):
            transport.close()


class LocalSide:
    """A worker in this process."""

    def __init__(self, side: Side) -> None:
        self.side = side

    async def call(self, name: str, *args: Any) -> Any:
        result = getattr(self.side, name)(*args)
        return await result if asyncio.iscoroutine(result) else result

    async def close(self) -> None:
        self.side.close()


class RemoteSide:
    """A worker in a process of its own, driven over a pipe; calls may overlap."""

    def __init__(self, spec: SideSpec, start_method: str = "spawn") -> None:
        """`forkserver` starts in a tenth of the time of `spawn`, but reaps a killed process."""
        context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            preloaded = ["transfer_sides", "kv_transfer.transports.ucx.transport"]
            context.set_forkserver_preload(preloaded)
        self._pipe, there = context.Pipe()
        self.process = context.Process(target=serve_side, args=(spec, there), daemon=True)
        self.process.start()
        there.close()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._calls = 0
        self._reader: asyncio.Task[None] | None = None

    async def call(self, name: str, *args: Any) -> Any:
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        self._calls += 1
        future = self._waiting[self._calls] = asyncio.get_running_loop().create_future()
        self._pipe.send((self._calls, name, args))
        return await future

    async def _read(self) -> None:
        while True:
            try:
                number, ok, value = await asyncio.to_thread(self._pipe.recv)
            except (EOFError, ConnectionResetError):
                return
            future = self._waiting.pop(number)
            if not future.cancelled():
                future.set_result(value) if ok else future.set_exception(value)

    def kill(self) -> None:
        """SIGKILL; the process stays a zombie until `reap`."""
        self.process.kill()

    def reap(self) -> None:
        self.process.join()

    async def close(self) -> None:
        if self.process.is_alive():
            await self.call("close")
            self._pipe.send(None)
        await asyncio.to_thread(self.process.join)
        if self._reader is not None:
            await self._reader
        self._pipe.close()


def serve_side(spec: SideSpec, pipe: Connection) -> None:
    _die_with_parent()
    asyncio.run(_serve_side(spec, pipe))


async def _serve_side(spec: SideSpec, pipe: Connection) -> None:
    side = LocalSide(Side(spec, [make_transport(spec.config) for _ in range(spec.tp_size)]))
    tasks = set()

    def answer(number: int, task: asyncio.Task[Any]) -> None:
        tasks.discard(task)
        error = task.exception()  # which the test raises
        pipe.send((number, error is None, task.result() if error is None else error))

    while (request := await asyncio.to_thread(pipe.recv)) is not None:
        number, name, args = request
        task = asyncio.create_task(side.call(name, *args))
        tasks.add(task)
        task.add_done_callback(partial(answer, number))


def _die_with_parent() -> None:
    """A test run that is killed leaves no process behind."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"))
    if libc.prctl(1, 9, 0, 0, 0):  # PR_SET_PDEATHSIG, SIGKILL
        sys.exit("prctl failed")
