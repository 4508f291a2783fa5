"""A real handoff, within this machine or to another node: which transports it used, and how fast.

A fault in UCX or a driver may end a process. So the preflight starts itself again with `--device`;
that process hands over and prints one line of JSON. `LoneRank` is the transfer side of a worker
without an engine; benchmarks use it too.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from baton.config.transfer import TransferConfig
from baton.process.interpreter import share_interpreter
from baton.v1 import common_pb2, worker_pb2
from cluster.preflight.machine import (
    Check,
    Link,
    Wanted,
    failure,
    ok,
    rdma_links,
    tcp_links,
    warning,
)
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
from kv_transfer.rank import TransferRank
from kv_transfer.transports.by_name import make_transport
from kv_transfer.transports.ucx.endpoint import CUDA_COPIES, SHARED_MEMORY
from kv_transfer.transports.ucx.transport import UcxTransport

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
        self.exporter = Exporter(self.rank, _FINGERPRINT, lambda: True)

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
_BLOCKS = [BlockId(block) for block in range(1, 4 * _BLOCKS_PER_REGION, 2)]
"""No two of them are neighbours."""
_SLOW_GB_PER_S = 0.5
_LEAST_OF_LINK = 0.5
_MEET_S = 300.0
"""Longest wait for the other pod, whose node may have to pull the image."""
_TRY_S, _PAUSE_S = 5.0, 1.0
_LEASE, _END = b"lease", b"end"
_LONGEST_MESSAGE = 1 << 20
_BETWEEN_PROCESSES = SHARED_MEMORY - {"self"}
_OWN_IMAGE = (
    "the image of deploy/images/worker.Dockerfile, whose libucx is built with CUDA and RDMA"
)
_WITH_CUDA = f"{_OWN_IMAGE}, or spec.advanced.transfer.ucxLibrary: wheel (built with CUDA, no RDMA)"
_FIXES = {
    "cannot load libucp": f"{_OWN_IMAGE}, or spec.advanced.transfer.ucxLibrary: wheel",
    "cannot reach cuda memory": _WITH_CUDA,
    "nobody": "see whether the other pool's Job is placed and what it says; let NetworkPolicies "
    "admit the release's preflight pods to each other at every port",
}
"""Transport error text -> fix."""
_RDMA = ("rc_", "dc_", "ud_", "srd")
"""Prefixes of UCX's names of RDMA transports."""


@dataclass(frozen=True)
class Report:
    """The handoff's result. `transports`: what UCX could use here; `lanes`: what it used;
    `receiver`: its node."""

    version: str
    transports: list[str]
    lanes: list[str]
    num_bytes: int
    gb_per_s: float
    receiver: str = ""


@dataclass(frozen=True)
class Meeting:
    """How this pod and another one find each other: one listens at `port`, the other connects to
    `address`. `node`: the name of this pod's."""

    node: str
    port: int | None = None
    address: str | None = None


def check_handoff(wanted: Wanted, device: str) -> list[Check]:
    """Run the handoff within this machine and check it. `device`: cpu or cuda memory. Takes one or
    two seconds; raises nothing."""
    try:
        report = Report(**json.loads(_run(wanted, device, (), _TIMEOUT_S)))
    except _BrokenError as error:
        return [_broken("handoff", str(error), wanted)]
    return [check_transports(report, wanted), check_lanes(report, device)]


def check_pair(root: Path, wanted: Wanted, device: str, meeting: Meeting) -> list[Check]:
    """Hand over to the pod that listens, or receive from the one that connects, and check what it
    took. Waits for the other for `_MEET_S` at most; raises nothing."""
    if meeting.port is not None:
        how = ("--node", meeting.node, "--listen", str(meeting.port))
    else:
        how = ("--node", meeting.node, "--connect", str(meeting.address))
    try:
        said = json.loads(_run(wanted, device, how, _MEET_S + _TIMEOUT_S))
    except _BrokenError as error:
        return [_broken("pair", str(error), wanted)]
    if meeting.port is not None:
        return [ok("pair", f"received from {said['sender']}, which judges it")]
    report = Report(**said)
    rdma, tcp = rdma_links(root, os.environ), tcp_links(root, os.environ)
    return judge_pair(report, wanted, meeting.node, rdma, tcp)


class _BrokenError(Exception):
    """The handoff's process failed, or took too long."""


def _run(wanted: Wanted, device: str, how: Sequence[str], timeout_s: float) -> str:
    """The last line that the handoff's process printed. Raises _BrokenError."""
    command = [
        *(sys.executable, "-m", "cluster.preflight", *how),
        *("--ucx-library", wanted.ucx_library, "--device", device),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _BrokenError(f"it took longer than {timeout_s:g} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        words = lines[-1] if lines else "it printed no error"
        raise _BrokenError(f"ended with {done.returncode}: {words}")
    return done.stdout.splitlines()[-1]


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
        return "spec.advanced.transfer.ucxLibrary: system (the wheel's has no RDMA)"
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


def judge_pair(
    report: Report, wanted: Wanted, node: str, rdma: Sequence[Link], tcp: Sequence[Link]
) -> list[Check]:
    """Check a handoff between nodes. `rdma`, `tcp`: this side's links that UCX may use."""
    rate = f"{report.num_bytes / 1e6:.0f} MB at {report.gb_per_s:.2g} GB/s"
    if report.receiver == node:
        found = f"both pods are on {node}, {rate}: no link between nodes was tried"
        return [warning("pair", found, "free room for one of them on another node of its pool")]
    uses_rdma = any(lane.startswith(_RDMA) for lane in report.lanes)
    return [
        ok("pair", f"{node} to {report.receiver}"),
        _transport(report, wanted, rdma),
        _bandwidth(report, rate, rdma if uses_rdma else tcp),
    ]


def _transport(report: Report, wanted: Wanted, rdma: Sequence[Link]) -> Check:
    found = ", ".join(report.lanes)
    if "tcp" not in report.lanes or any(lane.startswith(_RDMA) for lane in report.lanes):
        return ok("transport", found)
    if wanted.rdma:
        fix = "the adapters' rows above, on both nodes; UCX_TLS and UCX_NET_DEVICES in "
        return failure(
            "transport", f"{found}: UCX fell back to TCP", f"{fix}cluster.nodes.env must leave them"
        )
    if rdma:
        names = ", ".join(link.name for link in rdma)
        fix = "cluster.nodes.preset: gpu-rdma, and rdma/... in cluster.nodes.resources"
        return warning("transport", f"{found}, though {names} could carry RDMA", fix)
    return ok("transport", f"{found}: no RDMA adapter is here")


def _bandwidth(report: Report, rate: str, links: Sequence[Link]) -> Check:
    link = max(links, key=lambda each: each.gb_per_s, default=None)
    fix = "look for other load on the link, the MTU, a CPU limit of the pod that throttles"
    if link is None:
        found = f"{rate}; the link's own speed is not seen in this pod"
        is_slow = report.gb_per_s < _SLOW_GB_PER_S
        return warning("bandwidth", found, fix) if is_slow else ok("bandwidth", found)
    share = report.gb_per_s * 8 / link.gb_per_s
    found = f"{rate}, {share:.0%} of {link.name}'s {link.gb_per_s:g} Gb/s"
    if share < _LEAST_OF_LINK:
        return warning("bandwidth", found, f"{fix}, the adapter's PCIe slot (nvidia-smi topo -m)")
    return ok("bandwidth", found)


def _broken(name: str, found: str, wanted: Wanted) -> Check:
    options = f"--device {'cuda' if wanted.num_gpus else 'cpu'} --ucx-library {wanted.ucx_library}"
    usual = f"python -m cluster.preflight {options} shows more"
    fixes = [fix for words, fix in _FIXES.items() if words in found]
    return failure(name, found, fixes[0] if fixes else usual)


# --- the two processes ----------------------------------------------------------------------------


def _shape(device: str) -> MemoryShape:
    return MemoryShape(_BLOCK_BYTES, _BLOCKS_PER_REGION, device=device)


def _receiver_main(pipe: Connection, device: str, config: TransferConfig) -> None:
    uvloop.run(_receive(pipe, "", device, config))


async def _receive(pipe: Connection, node: str, device: str, config: TransferConfig) -> str:
    """Receive, and return the sender's node. The pipe carries protobuf: it may be the network."""
    rank = LoneRank(node, _shape(device), config)
    writer = _identity(await _next(pipe))
    pipe.send_bytes(rank.identity.to_proto().SerializeToString())
    while await _next(pipe) == _LEASE:
        lease = rank.table.grant("preflight", writer, [_BLOCKS], 0, _LEASE_S)
        pipe.send_bytes(lease.to_proto().SerializeToString())
    pipe.send_bytes(str(rank.count(_SENT)).encode())
    rank.close()
    return writer.worker_id


async def _send(pipe: Connection, node: str, device: str, config: TransferConfig) -> Report:
    """Send blocks and measure. Raises TransferError, EOFError if the receiver ended, and ValueError
    for lost bytes."""
    shape = _shape(device)
    rank = LoneRank(node, shape, config)
    rank.memory.buffer[:] = _SENT
    rank.count(_SENT)  # which waits for the GPU: a put would not
    pipe.send_bytes(rank.identity.to_proto().SerializeToString())
    receiver = _identity(await _next(pipe))
    fastest_s = float("inf")
    for _ in range(_NUM_ROUNDS):
        pipe.send_bytes(_LEASE)
        lease = Lease.from_proto(worker_pb2.Lease.FromString(await _next(pipe)))
        fastest_s = min(fastest_s, await _hand_over(rank, lease, _BLOCKS, shape.num_layers))
    pipe.send_bytes(_END)
    num_bytes = len(_BLOCKS) * shape.block_bytes * shape.num_layers
    arrived = int(await _next(pipe))
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
        receiver=receiver.worker_id,
    )
    rank.close()
    return report


async def _next(pipe: Connection) -> bytes:
    return await asyncio.to_thread(pipe.recv_bytes, _LONGEST_MESSAGE)


def _identity(message: bytes) -> WorkerIdentity:
    return WorkerIdentity.from_proto(common_pb2.WorkerRef.FromString(message))


async def _hand_over(
    rank: LoneRank, lease: Lease, blocks: Sequence[BlockId], num_layers: int
) -> float:
    """Seconds from the first push to the receiver's answer."""
    handoff = rank.exporter.open(lease)
    rank.rank.message(rank.exporter.opening(lease))
    start = time.perf_counter()
    rank.push(handoff, blocks, range(num_layers))
    rank.rank.step_done()
    await rank.exporter.finish(handoff, FirstToken(1))
    return time.perf_counter() - start


def _accepted(port: int) -> Connection:
    """Return the connection of whoever connects first. Raises OSError."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", port), family=family, dualstack_ipv6=both) as server:
        server.settimeout(_MEET_S)
        try:
            found, _ = server.accept()
        except TimeoutError as error:
            raise OSError(f"nobody came within {_MEET_S:g} s") from error
    found.setblocking(True)
    return Connection(found.detach())


def _connected(address: str) -> Connection:
    """Connect to HOST:PORT, whose pod may still have to start. Raises OSError."""
    host, _, port = address.rpartition(":")
    give_up_at = time.monotonic() + _MEET_S
    while True:
        try:
            found = socket.create_connection((host, int(port)), timeout=_TRY_S)
        except OSError as error:
            if time.monotonic() >= give_up_at:
                raise OSError(f"nobody listens at {address}: {error}") from error
            time.sleep(_PAUSE_S)
            continue
        found.setblocking(True)
        return Connection(found.detach())


def hand_over(library: str, device: str, meeting: Meeting | None) -> None:
    """Hand over in this process, and print a Report or the sender as JSON. Exits with an error."""
    config = TransferConfig(ucx_library=library)
    try:
        if meeting is None:
            print(json.dumps(asdict(_within(device, config))))
        elif meeting.port is not None:
            pipe = _accepted(meeting.port)
            print(json.dumps({"sender": uvloop.run(_receive(pipe, meeting.node, device, config))}))
        else:
            pipe = _connected(str(meeting.address))
            print(json.dumps(asdict(uvloop.run(_send(pipe, meeting.node, device, config)))))
    except (TransferError, EOFError, OSError, ValueError) as error:
        sys.exit(str(error) or "the other process ended")


def _within(device: str, config: TransferConfig) -> Report:
    """A handoff to another process of this machine."""
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    process = context.Process(target=_receiver_main, args=(there, device, config), daemon=True)
    process.start()
    there.close()  # so that the end of the receiver is an EOF
    report = uvloop.run(_send(pipe, "", device, config))
    process.join(_TIMEOUT_S)
    return report
