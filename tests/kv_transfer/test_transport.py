"""What a transport promises, and what making one leaves behind: over the twin and over UCX."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transfer_sides import LAYOUT
from ways import runs_between

from baton.config.transfer import TransferConfig
from kv_transfer.errors import TransportError
from kv_transfer.layout import RegionLayout
from kv_transfer.lease import Lease, LeaseId, RankLease, WorkerIdentity
from kv_transfer.rank import TransferRank
from kv_transfer.transport import FlushResult, PutBatch, Transport
from kv_transfer.transports.by_name import make_transport
from kv_transfer.transports.memory_transport import MemoryNetwork, Operation, ThreadScheduler
from kv_transfer.transports.ucx.transport import UcxTransport

CONFIGS = [TransferConfig(transport="memory"), TransferConfig()]


@pytest.fixture(params=CONFIGS, ids=["memory", "ucx"])
def config(request: pytest.FixtureRequest) -> TransferConfig:
    found: TransferConfig = request.param
    return found


@pytest.fixture
def two(config: TransferConfig) -> Iterator[tuple[Transport, Transport]]:
    both = make_transport(config), make_transport(config)
    yield both
    for transport in both:
        transport.close()
        transport.close()  # a second time does nothing


def segments() -> int:
    """System V segments that this process has made and that still exist."""
    head, *rows = (line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines())
    return sum(row[head.index("cpid")] == str(os.getpid()) for row in rows)


def test_puts_land_before_their_flush_and_messages_come_in_order(
    two: tuple[Transport, Transport],
) -> None:
    a, b = two
    here, there = a.allocate(2, 5000, 4), b.allocate(3, 5000, 4)
    assert here.region_stride_bytes == 8192
    arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    flushed: queue.SimpleQueue[FlushResult] = queue.SimpleQueue()
    a.start(lambda _payload: None, lambda _address: None)
    b.start(arrived.put, lambda _address: None)
    here.buffer[:] = 1
    peer = a.connect(b.put_address)
    assert a.connect(b.put_address) is peer
    a.prepare(peer, there.regions)
    runs = runs_between(here.regions, there.regions, 100, (4, 0), (0, 8))
    refused: list[str] = []
    unknown = replace(runs, path=replace(runs.path, rkeys=(b"no such key",) * 3))
    a.put(peer, PutBatch(runs, 8, 16), refused.append)
    a.flush(peer, flushed.put)
    assert flushed.get(timeout=10).error is None
    a.put(peer, PutBatch(unknown), refused.append)
    a.flush(peer, flushed.put)
    assert flushed.get(timeout=10).error is None  # of the flush: it waits for what was posted
    assert len(refused) == 1
    for payload in (b"", b"one", bytes(500_000)):
        a.send(a.connect(b.address), payload)
    assert [len(arrived.get(timeout=10)) for _ in range(3)] == [0, 3, 500_000]
    expected = np.zeros_like(there.buffer)
    expected[16:116] = expected[2 * 8192 + 16 : 2 * 8192 + 116] = 1
    assert (there.buffer == expected).all()


def becomes(byte: np.ndarray, value: int, bound_s: float) -> bool:
    end_s = time.monotonic() + bound_s
    while byte[0] != value and time.monotonic() < end_s:
        pass
    return bool(byte[0] == value)


def test_a_put_behind_another_needs_no_turn_of_the_interpreter() -> None:
    num_bytes = 64 << 20  # so long that the next is asked for in the meantime, as a rule
    a, b = UcxTransport(TransferConfig()), UcxTransport(TransferConfig())
    here, there = a.allocate(1, num_bytes, 1), b.allocate(1, num_bytes, 1)
    for transport in (a, b):
        transport.start(lambda _payload: None, lambda _address: None)
    peer, flushed = a.connect(b.address), queue.SimpleQueue[FlushResult]()
    first, whole = (runs_between(here.regions, there.regions, n) for n in (1, num_bytes))
    interval_s, landed = sys.getswitchinterval(), False
    for value in range(1, 41):
        here.buffer[0] = 255
        a.put(peer, PutBatch(whole), pytest.fail)
        assert becomes(there.buffer, 255, 10)
        here.buffer[0] = value
        sys.setswitchinterval(1000)  # this thread keeps the interpreter
        try:
            a.put(peer, PutBatch(first), pytest.fail)
            landed = becomes(there.buffer, value, 0.2)
        finally:
            sys.setswitchinterval(interval_s)
        a.flush(peer, flushed.put)
        assert flushed.get(timeout=10).error is None
        if landed:  # once is proof: Python had no turn. Not at once: the long put was over before
            break
    a.close()
    b.close()
    assert landed


class InterruptedTransport(UcxTransport):
    """Runs these on another thread, one whenever its own has found nothing to do."""

    meanwhile: Sequence[Callable[[], None]] = ()

    def _turn(self) -> bool:
        worked = super()._turn()
        if not worked and self.meanwhile:
            other, self.meanwhile = threading.Thread(target=self.meanwhile[0]), self.meanwhile[1:]
            other.start()
            other.join()
        return worked


def test_no_command_is_overlooked_by_a_thread_that_is_about_to_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_KEEPALIVE_INTERVAL", "60s")  # which would wake it
    transport = InterruptedTransport(TransferConfig())
    transport.start(lambda _payload: None, lambda _address: None)
    peer, answered = transport.connect(transport.address), queue.SimpleQueue[FlushResult]()
    transport.meanwhile = [lambda: transport.flush(peer, answered.put)] * 10
    for _ in range(10):
        answered.get(timeout=5)
    transport.close()


def test_the_pool_is_torchs_memory_without_a_copy(two: tuple[Transport, Transport]) -> None:
    memory = two[0].allocate(2, 4096, 1)
    tensor = torch.from_numpy(memory.buffer)
    assert tensor.data_ptr() == memory.regions[0].base_address
    tensor.fill_(9)
    assert int(memory.buffer.sum()) == 9 * memory.buffer.size


def test_making_and_closing_leaves_no_memory_file_or_thread_behind() -> None:
    def once() -> None:
        transport = make_transport(TransferConfig())
        transport.allocate(3, 1 << 16, 4)
        transport.start(lambda _payload: None, lambda _address: None)
        transport.connect(transport.address)
        transport.close()

    once()
    before = segments(), len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        once()
    assert (segments(), len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_discarding_some_operations_leaves_the_others_in_order() -> None:
    scheduler, ran = ThreadScheduler(), queue.SimpleQueue[int]()
    begun, goes_on, one_ran = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        goes_on.wait(10)

    def number(value: int) -> Operation:
        def run() -> None:
            ran.put(value)
            one_ran.set()

        return Operation("put", b"gone" if value == 3 else b"kept", b"target", run)

    def is_unwanted(operation: Operation) -> bool:
        goes_on.set()
        one_ran.wait(0.05)  # may the other thread take what this one has not looked at yet?
        return operation.source == b"gone"

    scheduler.schedule(Operation("put", b"held", b"target", hold))
    assert begun.wait(10)
    for value in range(6):
        scheduler.schedule(number(value))
    scheduler.discard(is_unwanted)
    assert [ran.get(timeout=10) for _ in range(5)] == [0, 1, 2, 4, 5]


def test_discarding_waits_for_an_unwanted_operation_that_has_begun() -> None:
    scheduler = ThreadScheduler()
    begun, goes_on, over = threading.Event(), threading.Event(), threading.Event()

    def put() -> None:
        begun.set()
        goes_on.wait(10)
        over.set()

    scheduler.schedule(Operation("put", b"gone", b"target", put))
    assert begun.wait(10)
    threading.Timer(0.05, goes_on.set).start()
    scheduler.discard(lambda operation: operation.source == b"gone")
    assert over.is_set()


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(TransportError, match="/no/such/libucp"):
        make_transport(TransferConfig(ucx_library="/no/such/libucp.so"))


def test_a_pool_that_does_not_fit_is_an_error() -> None:
    transport = make_transport(TransferConfig())
    with pytest.raises(TransportError):
        transport.allocate(1, 1 << 52, 1)
    transport.close()


class DeviceTensor:
    """Host memory that says it lies on a device."""

    def __init__(self, kind: str) -> None:
        self.device = torch.device(kind)
        self._held = torch.zeros(4096, dtype=torch.uint8)

    def data_ptr(self) -> int:
        return self._held.data_ptr()

    def numel(self) -> int:
        return self._held.numel()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine's libucp reaches its GPU")
def test_device_memory_that_cannot_be_reached_is_refused_by_name() -> None:
    transport = make_transport(TransferConfig())
    with pytest.raises(TransportError, match="cuda"):
        transport.register(DeviceTensor("cuda"), 1, 1)
    with pytest.raises(TransportError, match="mps"):
        transport.register(DeviceTensor("mps"), 1, 1)
    transport.close()


@pytest.mark.gpu
def test_an_expandable_segment_is_refused_by_name() -> None:
    code = (
        "import torch\n"
        "from baton.config.transfer import TransferConfig\n"
        "from kv_transfer.transports.by_name import make_transport\n"
        "pool = torch.zeros(4 << 20, dtype=torch.uint8, device='cuda')\n"
        "make_transport(TransferConfig()).register(pool, 1, 1)\n"
    )
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **setting},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "TransportError: the KV pool lies in an expandable segment" in run.stderr


def test_without_a_compiler_and_a_library_built_ahead_a_transport_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TransportError, match="the loop that posts puts cannot be built: "):
        make_transport(TransferConfig())


def test_a_lease_survives_the_wire() -> None:
    transport = MemoryNetwork.shared().join()
    memory = transport.allocate(2, RegionLayout(LAYOUT, 0, 1, 4).num_bytes(), 4)
    worker = WorkerIdentity("w", 3, (TransferRank.address_of(transport, 0),))
    lease = Lease(
        lease_id=LeaseId("l"),
        lease_epoch=4,
        owner=worker,
        writer=worker,
        kv_fingerprint=b"f",
        ranks=(RankLease(0, memory.regions, b"put"),),
        num_cached_tokens=8,
        renew_within_s=1.5,
        block_ids=((1, 2), (0, 3)),  # type: ignore[arg-type]
    )
    assert Lease.from_proto(lease.to_proto()) == lease
    transport.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"renew_within_s": 0.0},
        {"renew_within_s": 0.0005},
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        TransferConfig(**wrong)  # type: ignore[arg-type]
