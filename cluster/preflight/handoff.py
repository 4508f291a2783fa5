"""A real handoff between two processes of this machine: which transports it used, and how fast.

    python -m cluster.preflight.handoff [--library wheel|system|PATH] [--device cpu|cuda]

A fault in UCX or a driver may end a process. So the preflight runs this as a separate process,
which prints one line of JSON. `LoneRank` is the transfer side of a worker without an engine;
benchmarks use it too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import uvloop

from baton.config.transfer import TransferConfig
from baton.interpreter import share_interpreter
from cluster.preflight.machine import Check, Wanted, failure, ok, warning
from engine.api import LocalDeviceMemory
from kv_transfer.errors import TransferError
from kv_transfer.exporter import Exporter
from kv_transfer.layout import (
    BlockId,
    BlockPush,
    HandoffId,
    KvLayout,
    LayerGroup,
    RegionLayout,
    TensorSpec,
)
from kv_transfer.lease import FirstToken, Lease, WorkerIdentity
from kv_transfer.lease_table import LeaseFailure, LeaseTable
from kv_transfer.rank import TransferRank, make_transport
from kv_transfer.ucx.endpoint import CUDA_COPIES, SHARED_MEMORY
from kv_transfer.ucx.transport import UcxTransport

_BLOCK_SIZE = 16
_FINGERPRINT = b"lone"


@dataclass(frozen=True)
class MemoryShape:
    """KV memory of one rank; `block_bytes` is per layer."""

    block_bytes: int
    blocks_per_region: int
    num_layers: int = 8
    num_regions: int = 4
    device: str = "cpu"


class LoneRank:
    """Memory, sink, lease table and exporter. Create it on a running event loop."""

    def __init__(self, name: str, shape: MemoryShape, config: TransferConfig) -> None:
        share_interpreter()
        self.on_admitted: Callable[[], None] = lambda: None
        """Called on the event loop when a handoff has arrived."""
        tensor = TensorSpec("kv", 1, shape.block_bytes // _BLOCK_SIZE // 2, "bfloat16")
        layout = KvLayout(_BLOCK_SIZE, (LayerGroup(0, shape.num_layers, (tensor,)),))
        self.layout = RegionLayout(layout, 0, 1, shape.blocks_per_region)
        self.transport = make_transport(config)
        if shape.device == "cpu":
            self.memory = self.transport.allocate(
                shape.num_regions, self.layout.num_bytes(), shape.blocks_per_region
            )
        else:
            pool = LocalDeviceMemory(self.layout, shape.num_regions, shape.device)
            self.memory = self.transport.register(
                pool.buffer, shape.num_regions, shape.blocks_per_region
            )
        address = TransferRank.address_of(self.transport, 0)
        self.identity = WorkerIdentity(name, 1, (address,))
        self.rank = TransferRank(self.transport, self.memory, self.layout, self.identity, config)
        self.table = LeaseTable(self.rank, _FINGERPRINT, self)
        self.exporter = Exporter(self.rank, _FINGERPRINT, self.rank.message, lambda: True)

    def push(self, handoff: HandoffId, blocks: Sequence[BlockId], layers: Iterable[int]) -> None:
        """Push the handoff's first blocks, in the order of the lease."""
        push = BlockPush(handoff, 0, tuple(range(len(blocks))), tuple(blocks))
        for layer in layers:
            self.rank.layer_done(layer, [push])

    def count(self, value: int) -> int:
        """Number of bytes of the memory that hold `value`."""
        return int((self.memory.buffer == value).sum())

    def admitted(self, request_id: str, first: FirstToken) -> None:
        self.on_admitted()

    def failed(
        self, request_id: str, reason: LeaseFailure, ended_by: FirstToken | None = None
    ) -> None:
        raise RuntimeError(f"{request_id}: {reason}")

    def quiescent(self, request_id: str) -> None:
        pass

    def close(self) -> None:
        del self.memory
        self.transport.close()


_TIMEOUT_S = 60.0
_LEASE_S = 30.0
_BLOCK_BYTES = 64 << 10
_BLOCKS_PER_REGION = 65
_NUM_ROUNDS = 3
"""The first one maps what later ones find mapped."""
_SENT = 7
_SLOW_GB_PER_S = 0.5
_BETWEEN_PROCESSES = SHARED_MEMORY - {"self"}
_OWN_IMAGE = (
    "the image of deploy/images/worker.Dockerfile, whose libucx is built with CUDA and RDMA"
)
_WITH_CUDA = f"{_OWN_IMAGE}, or spec.transfer.ucxLibrary: wheel (built with CUDA, no RDMA)"
_FIXES = {
    "cannot load libucp": f"{_OWN_IMAGE}, or spec.transfer.ucxLibrary: wheel",
    "cannot reach cuda memory": _WITH_CUDA,
}
"""Transport error text -> fix."""
_RDMA = ("rc_", "dc_", "ud_", "srd")
"""Prefixes of UCX's names of RDMA transports."""


@dataclass(frozen=True)
class Report:
    """The handoff's result. `transports`: what UCX could use here; `lanes`: what it used."""

    version: str
    transports: list[str]
    lanes: list[str]
    num_bytes: int
    gb_per_s: float


def check_handoff(wanted: Wanted, device: str) -> list[Check]:
    """Run the handoff and check it. `device`: cpu or cuda memory. Takes one or two seconds; raises
    nothing."""
    command = [
        *(sys.executable, "-m", __name__),
        *("--library", wanted.ucx_library, "--device", device),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [_broken(f"not over after {_TIMEOUT_S:g} s", wanted)]
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        words = lines[-1] if lines else "no word"
        return [_broken(f"ended with {done.returncode}: {words}", wanted)]
    report = Report(**json.loads(done.stdout.splitlines()[-1]))
    return [check_transports(report, wanted), check_lanes(report, device)]


def check_transports(report: Report, wanted: Wanted) -> Check:
    found = f"{report.version} ({wanted.ucx_library}): {', '.join(report.transports)}"
    if wanted.rdma and not any(name.startswith(_RDMA) for name in report.transports):
        return failure("UCX", f"{found}; none with RDMA", _rdma_fix(wanted))
    if wanted.num_gpus and not CUDA_COPIES & {*report.transports}:
        return failure("UCX", f"{found}; none that knows a GPU's memory", _WITH_CUDA)
    if not _BETWEEN_PROCESSES & {*report.transports}:
        fix = "leave sysv and posix in UCX_TLS: pods of one node, and ranks, copy through them"
        return warning("UCX", f"{found}; none with shared memory", fix)
    return ok("UCX", found)


def _rdma_fix(wanted: Wanted) -> str:
    if wanted.ucx_library == "wheel":
        return "spec.transfer.ucxLibrary: system (the wheel's has no RDMA)"
    return f"{_OWN_IMAGE}; and see the adapters' checks above"


def check_lanes(report: Report, device: str) -> Check:
    found = (
        f"{report.num_bytes / 1e6:.0f} MB at {report.gb_per_s:.1f} GB/s "
        f"over {', '.join(report.lanes)}"
    )
    direct = {*report.lanes} & (CUDA_COPIES if device == "cuda" else _BETWEEN_PROCESSES)
    if not direct:
        missing = "a GPU's own copies" if device == "cuda" else "shared memory"
        fix = "UCX_TLS and the container's IPC namespace keep two processes of one pod from sharing"
        return warning("handoff", f"{found}; {missing} was not used", fix)
    if report.gb_per_s < _SLOW_GB_PER_S:
        fix = "look for other load, a CPU limit of the pod that throttles, pods across NUMA nodes"
        return warning("handoff", f"{found}: slow", fix)
    return ok("handoff", found)


def _broken(found: str, wanted: Wanted) -> Check:
    usual = f"python -m {__name__} --library {wanted.ucx_library} shows more"
    fixes = [fix for words, fix in _FIXES.items() if words in found]
    return failure("handoff", found, fixes[0] if fixes else usual)


# --- the two processes ----------------------------------------------------------------------------


def _shape(device: str) -> MemoryShape:
    return MemoryShape(_BLOCK_BYTES, _BLOCKS_PER_REGION, device=device)


def _receiver_main(pipe: Connection, device: str, config: TransferConfig) -> None:
    uvloop.run(_receive(pipe, device, config))


async def _receive(pipe: Connection, device: str, config: TransferConfig) -> None:
    rank = LoneRank("receiver", _shape(device), config)
    writer: WorkerIdentity = await asyncio.to_thread(pipe.recv)
    pipe.send(rank.identity)
    while (blocks := await asyncio.to_thread(pipe.recv)) is not None:
        pipe.send(rank.table.grant("preflight", writer, [blocks], 0, _LEASE_S))
    pipe.send(rank.count(_SENT))
    rank.close()


async def _send(pipe: Connection, device: str, config: TransferConfig) -> Report:
    """Send blocks and measure. Raises TransferError, EOFError if the receiver ended, and ValueError
    for lost bytes."""
    rank = LoneRank("sender", _shape(device), config)
    rank.memory.buffer[:] = _SENT
    rank.count(_SENT)  # which waits for the GPU: a put would not
    pipe.send(rank.identity)
    await asyncio.to_thread(pipe.recv)
    shape = _shape(device)
    last = shape.num_regions * shape.blocks_per_region
    blocks = [BlockId(block) for block in range(1, last, 2)]  # no two of them are neighbours
    fastest_s = float("inf")
    for _ in range(_NUM_ROUNDS):
        pipe.send(blocks)
        lease: Lease = await asyncio.to_thread(pipe.recv)
        fastest_s = min(fastest_s, await _hand_over(rank, lease, blocks, shape.num_layers))
    pipe.send(None)
    num_bytes = len(blocks) * shape.block_bytes * shape.num_layers
    arrived = await asyncio.to_thread(pipe.recv)
    if arrived != num_bytes:
        raise ValueError(f"{arrived} bytes have arrived of {num_bytes}")
    transport = rank.transport
    assert isinstance(transport, UcxTransport)
    report = Report(
        version=".".join(map(str, transport.version)),
        transports=sorted(transport.transports),
        lanes=sorted(transport.connect(lease.ranks[0].put_address).lanes),
        num_bytes=num_bytes,
        gb_per_s=num_bytes / fastest_s / 1e9,
    )
    rank.close()
    return report


async def _hand_over(
    rank: LoneRank, lease: Lease, blocks: Sequence[BlockId], num_layers: int
) -> float:
    """Seconds from the first push to the receiver's answer."""
    handoff = rank.exporter.open(lease)
    start = time.perf_counter()
    rank.push(handoff, blocks, range(num_layers))
    rank.rank.step_done()
    await rank.exporter.finish(handoff, FirstToken(1))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library", default="wheel")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    config = TransferConfig(ucx_library=options.library)
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    process = context.Process(
        target=_receiver_main, args=(there, options.device, config), daemon=True
    )
    process.start()
    there.close()  # so that the end of the receiver is an EOF
    try:
        report = uvloop.run(_send(pipe, options.device, config))
    except (TransferError, EOFError, OSError) as error:
        sys.exit(str(error) or "the receiving process ended")
    process.join(_TIMEOUT_S)
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    main()
