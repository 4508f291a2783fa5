"""Handoff bandwidth beside memcpy, and how long a handoff's answer takes.

    python -m bench.handoff [--rounds 15] [--checksum off|sampled|always]

Two processes, one Baton handoff a round: scattered blocks go into the other process (256, a short
prompt's; 2,048, a long one's), then `done` -> admission -> `Ack`. In the same round, before or
after it by turns, the same blocks are copied by memcpy inside one process (one C call that copies
each run). Medians over the rounds; every round's sources and targets are others. The handoff
pushes its layers without a pause: in a prefill they go while later layers are computed, and what is
left after the last is `exposed`.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import numpy as np
import uvloop

from baton.config.transfer import TransferConfig
from baton.native_build import build
from bench.report import markdown
from cluster.preflight.handoff import LoneRank, MemoryShape
from kv_transfer.layout import BlockId, HandoffId
from kv_transfer.lease import FirstToken, Lease, WorkerIdentity
from kv_transfer.routes import Route
from kv_transfer.transport import FlushResult
from kv_transfer.transports.ucx.native import POST_LOOP
from kv_transfer.transports.ucx.transport import UcxTransport

BLOCK_BYTES = (32 << 10, 64 << 10, 128 << 10)
NUM_RUNS = (256, 2048)
NUM_LAYERS = 8
NUM_REGIONS = 4
BLOCKS_PER_REGION = 136  # of which every other one is enough for a layer of the larger handoff
SENT = 7  # every byte of the sender's pool


@dataclass(frozen=True)
class Result:
    """Medians. GB/s over all blocks: `put` counts posting and flushing alone, `handoff` all until
    the receiver's event loop hears that it is whole, which is when it decodes, `answered` also the
    answer's way back, for which no request waits; `exposed_us` is what is left of a handoff when
    its last layer is computed and the earlier ones have been pushed; `answer_us` is a handoff
    without blocks, there and back."""

    num_runs: int
    block_bytes: int
    put_gb_s: float
    handoff_gb_s: float
    answered_gb_s: float
    memcpy_gb_s: float
    exposed_us: float
    answer_us: float
    lanes: tuple[str, ...]

    def cells(self) -> tuple[str, ...]:
        copy = self.memcpy_gb_s
        return (
            f"{self.num_runs:,} of {self.block_bytes >> 10} KiB",
            f"{copy:.1f}",
            *(f"{self.put_gb_s:.1f}", f"{self.put_gb_s / copy:.2f}"),
            *(f"{self.handoff_gb_s:.1f}", f"{self.handoff_gb_s / copy:.2f}"),
            *(f"{self.answered_gb_s / copy:.2f}", f"{self.exposed_us:.0f}"),
            f"{self.answer_us:.0f}",
        )


def header_of(copy: str) -> tuple[str, ...]:
    """Names of `Result.cells`; `copy`: what handoffs are measured beside."""
    return (
        *("blocks", f"{copy} GB/s", "put GB/s", f"put/{copy}", "handoff GB/s", f"handoff/{copy}"),
        *(f"with answer/{copy}", "exposed us", "answer us"),
    )


def shape(block_bytes: int, device: str = "cpu") -> MemoryShape:
    return MemoryShape(block_bytes, BLOCKS_PER_REGION, NUM_LAYERS, NUM_REGIONS, device)


def scattered(seed: int, count: int) -> list[BlockId]:
    """Block ids without neighbours, so that nothing coalesces; never the null block."""
    blocks = np.arange(1, NUM_REGIONS * BLOCKS_PER_REGION, 2)
    return [BlockId(int(b)) for b in np.random.default_rng(seed).permutation(blocks)[:count]]


async def receive(pipe: Connection, block_bytes: int, config: TransferConfig, device: str) -> None:
    worker = LoneRank("receiver", shape(block_bytes, device), config)
    writer: WorkerIdentity = await asyncio.to_thread(pipe.recv)
    pipe.send(worker.identity)
    admitted = asyncio.Event()
    admitted_at_s = 0.0

    def note() -> None:
        nonlocal admitted_at_s
        admitted_at_s = time.perf_counter()  # one clock for all processes of a machine
        admitted.set()

    worker.on_admitted = note
    while (blocks := await asyncio.to_thread(pipe.recv)) is not None:
        pipe.send(worker.table.grant("bench", writer, [blocks], 0, 60.0))
        await admitted.wait()
        admitted.clear()
        pipe.send(admitted_at_s)
    pipe.send(worker.count(SENT))
    worker.close()


def receiver_main(pipe: Connection, block_bytes: int, config: TransferConfig, device: str) -> None:
    uvloop.run(receive(pipe, block_bytes, config, device))  # as workers do


def run_receiver(
    block_bytes: int, config: TransferConfig, device: str = "cpu"
) -> tuple[Connection, multiprocessing.process.BaseProcess]:
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    process = context.Process(
        target=receiver_main, args=(there, block_bytes, config, device), daemon=True
    )
    process.start()
    return pipe, process


async def all_gone(worker: LoneRank, lease: Lease) -> None:
    """Return once the progress thread has done all that was asked of it for the lease's owner."""
    gone = asyncio.Event()
    wake = asyncio.get_running_loop().call_soon_threadsafe

    def on_flushed(_result: FlushResult) -> None:
        wake(gone.set)

    transport = worker.transport
    transport.flush(transport.connect(lease.ranks[0].put_address), on_flushed)
    await gone.wait()


def open_handoff(worker: LoneRank, lease: Lease) -> HandoffId:
    worker.rank.message(worker.exporter.opening(lease))
    return worker.exporter.open(lease)


@dataclass(frozen=True)
class Spent:
    """Seconds of one handoff, from its first push on."""

    posting_s: float
    until_admitted_s: float
    until_answered_s: float


async def hand_over(worker: LoneRank, pipe: Connection, blocks: Sequence[BlockId]) -> Spent:
    """As the receiver at the pipe's other end has just granted it."""
    lease = await asyncio.to_thread(pipe.recv)
    handoff = open_handoff(worker, lease)
    await all_gone(worker, lease)  # a first layer is computed in the meantime
    start = time.perf_counter()
    if blocks:
        worker.push(handoff, blocks, range(NUM_LAYERS))
        worker.rank.step_done()
    receipt = await worker.exporter.finish(handoff, FirstToken(1))
    answered_s = time.perf_counter() - start
    return Spent(receipt.put_s, await asyncio.to_thread(pipe.recv) - start, answered_s)


async def exposed_s(worker: LoneRank, pipe: Connection, blocks: Sequence[BlockId]) -> float:
    """Seconds from the last layer's push until the receiver's event loop hears that all is there;
    as in a prefill, the other layers have gone while later ones were computed."""
    lease = await asyncio.to_thread(pipe.recv)
    handoff = open_handoff(worker, lease)
    worker.push(handoff, blocks, range(NUM_LAYERS - 1))
    await all_gone(worker, lease)
    start = time.perf_counter()
    worker.push(handoff, blocks, [NUM_LAYERS - 1])
    worker.rank.step_done()
    await worker.exporter.finish(handoff, FirstToken(1))
    admitted_at_s: float = await asyncio.to_thread(pipe.recv)
    return admitted_at_s - start


class LocalCopy(Protocol):
    def seconds(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> float:
        """Of a copy of as many bytes, inside this process."""


class Memcpy:
    """Copies the same runs to the same blocks of a pool in this process, in one C call."""

    def __init__(self, worker: LoneRank) -> None:
        source = Path(__file__).with_name("copy_loop.c")
        recipe = replace(POST_LOOP, name=source.stem, sources=(source,))
        self._copy = ctypes.CDLL(str(build(recipe))).copy_runs
        self._copy.argtypes = [ctypes.c_size_t] + [ctypes.c_void_p] * 3 + [ctypes.c_uint64] * 2
        self._layout, self._regions = worker.layout, worker.memory.regions
        stride = worker.memory.region_stride_bytes
        self._pool = np.ones(NUM_REGIONS * stride, dtype=np.uint8)  # every page is touched
        base = self._pool.ctypes.data
        self._targets = tuple(
            replace(region, base_address=base + i * stride)
            for i, region in enumerate(self._regions)
        )

    def seconds(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> float:
        route = Route(self._layout, self._regions, 0, 1, self._targets)
        runs = route.runs(0, sources, targets)
        assert runs is not None
        columns = [np.array(c, np.uint64) for c in zip(*runs.coalesced(), strict=True)][:3]
        pointers = [column.ctypes.data for column in columns]
        start = time.perf_counter()
        for layer in range(NUM_LAYERS):
            batch = route.at_layer(runs, 0, layer)
            self._copy(len(columns[0]), *pointers, batch.source_offset, batch.target_offset)
        return time.perf_counter() - start


async def measure(
    num_runs: int,
    block_bytes: int,
    rounds: int,
    config: TransferConfig,
    device: str = "cpu",
    copy_of: Callable[[LoneRank], LocalCopy] = Memcpy,
) -> Result:
    """Raises ValueError when bytes have gone astray."""
    pipe, process = run_receiver(block_bytes, config, device)
    worker = LoneRank("sender", shape(block_bytes, device), config)
    worker.memory.buffer[:] = SENT
    worker.count(SENT)  # waits for a GPU, as a put would not
    pipe.send(worker.identity)
    receiver: WorkerIdentity = await asyncio.to_thread(pipe.recv)
    memcpy = copy_of(worker)
    written: set[BlockId] = set()
    samples: list[tuple[float, ...]] = []
    for number in range(rounds + 2):
        sources, targets = (scattered(2 * number + i, num_runs // NUM_LAYERS) for i in (0, 1))
        written.update(targets)
        # By turns, since the second one finds the sources in the cache.
        copy_s = memcpy.seconds(sources, targets) if number % 2 else 0.0
        pipe.send(targets)
        spent = await hand_over(worker, pipe, sources)
        copy_s = copy_s or memcpy.seconds(sources, targets)
        pipe.send(targets)
        left_s = await exposed_s(worker, pipe, sources)
        pipe.send([])
        empty = await hand_over(worker, pipe, [])
        samples.append((*astuple(spent), copy_s, left_s, empty.until_answered_s))
    lanes = _lanes(worker, receiver.rank0_address)
    pipe.send(None)
    arrived: int = await asyncio.to_thread(pipe.recv)
    if arrived != len(written) * block_bytes * NUM_LAYERS:
        raise ValueError(
            f"{arrived} bytes have arrived of {len(written) * block_bytes * NUM_LAYERS}"
        )
    await asyncio.to_thread(process.join)
    worker.close()
    put_s, admitted_s, answered_s, copy_s, left_s, answer_s = (
        statistics.median(column) for column in zip(*samples[2:], strict=True)
    )
    num_gb = num_runs * block_bytes / 1e9
    speeds = (num_gb / put_s, num_gb / admitted_s, num_gb / answered_s, num_gb / copy_s)
    return Result(num_runs, block_bytes, *speeds, left_s * 1e6, answer_s * 1e6, lanes)


def _lanes(worker: LoneRank, peer: bytes) -> tuple[str, ...]:
    """What UCX moved the bytes over."""
    assert isinstance(worker.transport, UcxTransport)
    return tuple(sorted(worker.transport.connect(peer).lanes))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--checksum", default="off", choices=("off", "sampled", "always"))
    options = parser.parse_args()
    config = TransferConfig(checksum=options.checksum)
    rows = [
        uvloop.run(measure(num_runs, block_bytes, options.rounds, config)).cells()
        for num_runs, block_bytes in itertools.product(NUM_RUNS, BLOCK_BYTES)
    ]
    print(markdown(header_of("memcpy"), rows))


if __name__ == "__main__":
    main()
