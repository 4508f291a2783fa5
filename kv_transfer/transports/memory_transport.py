"""The in-memory twin of the UCX transport: several "processes" in one interpreter, with faults.

Every put, flush, message and loss is an `Operation` that a scheduler runs. By default that is a
thread; the scheduler of a test delays, drops and reorders operations. A killed process runs no more
callbacks. What it has posted stays with the scheduler and can still land, as it can on a
network card, until it is reaped.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from kv_transfer.errors import TransportError
from kv_transfer.lease import Region
from kv_transfer.transport import (
    FlushResult,
    OnFailed,
    OnFatal,
    OnFlushed,
    OnMessage,
    OnPeerLost,
    OnRevoked,
    Peer,
    PutBatch,
    Tensor,
    TransferMemory,
)

log = logging.getLogger(__name__)

_ALIGNMENT = 4096
Kind = Literal["put", "flush", "message", "lost", "revoke"]


@dataclass(eq=False)
class Operation:
    """One operation that a process asked for. `payload` is set for a message."""

    kind: Kind
    source: bytes
    target: bytes
    run: Callable[[], None]
    payload: bytes = b""


class Scheduler(Protocol):
    def schedule(self, operation: Operation) -> None: ...

    def discard(self, unwanted: Callable[[Operation], bool]) -> None:
        """Drop the unwanted operations, and wait for an unwanted one that is already running. The
        others keep their order."""


class ThreadScheduler:
    """Run all operations in order on one thread."""

    def __init__(self) -> None:
        self._pending: deque[Operation] = deque()
        self._running: Operation | None = None
        self._changed = threading.Condition()  # guards both
        self._thread = threading.Thread(target=self._run, name="memory-transport", daemon=True)
        self._thread.start()

    def schedule(self, operation: Operation) -> None:
        with self._changed:
            self._pending.append(operation)
            self._changed.notify_all()

    def discard(self, unwanted: Callable[[Operation], bool]) -> None:
        with self._changed:
            self._pending = deque(o for o in self._pending if not unwanted(o))
            if threading.current_thread() is not self._thread:
                begun = self._running
                if begun is not None and unwanted(begun):
                    self._changed.wait_for(lambda: self._running is not begun)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending)
                operation = self._running = self._pending.popleft()
            try:
                operation.run()
            finally:
                with self._changed:
                    self._running = None
                    self._changed.notify_all()


def _check_within(region: Region, address: int, num_bytes: int) -> None:
    end = region.base_address + region.num_bytes
    inside = region.base_address <= address and address + num_bytes <= end
    assert inside, f"{num_bytes} bytes at {address:#x} are outside region {region.rkey!r}"


@dataclass(eq=False)
class MemoryPeer:
    address: bytes
    lost: bool = False
    busy_s: float = field(default=0.0)


class MemoryNetwork:
    """The processes that can reach each other."""

    _shared: ClassVar[MemoryNetwork | None] = None

    def __init__(
        self, scheduler: Scheduler | None = None, puts_outlive_connection: bool = False
    ) -> None:
        """Begin without processes. `puts_outlive_connection`: as over TCP, puts land even after the
        connection or the writer's process has ended."""
        self.scheduler: Scheduler = scheduler or ThreadScheduler()
        self.puts_outlive_connection = puts_outlive_connection
        self._processes: dict[bytes, MemoryTransport] = {}
        self._numbers = itertools.count()

    @classmethod
    def shared(cls) -> MemoryNetwork:
        """The interpreter-wide network that `make_transport` joins."""
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    def join(self) -> MemoryTransport:
        address = b"memory-%d" % next(self._numbers)
        transport = self._processes[address] = MemoryTransport(self, address)
        return transport

    def process(self, address: bytes) -> MemoryTransport | None:
        """Find the process at an address, of either kind; None once it is dead or closed."""
        return self._processes.get(_owner(address))

    def kill(self, address: bytes, noticed: bool = True) -> None:
        """End a process; its posted operations may still land. `noticed`: its peers learn of it."""
        self._processes.pop(address).dead = True
        if noticed:
            self.notice(address)

    def notice(self, address: bytes) -> None:
        """Report a dead process as lost to every process connected to it."""
        for process in list(self._processes.values()):
            process.schedule_loss(address)

    def reap(self, address: bytes) -> None:
        """Drop everything that a dead process has posted, so that nothing more can land."""
        self.scheduler.discard(lambda operation: operation.source == address)


class MemoryTransport:
    """The `kv_transfer.transport.Transport` of processes in one interpreter."""

    def __init__(self, network: MemoryNetwork, address: bytes) -> None:
        self.dead = False
        self.on_fatal: OnFatal | None = None
        self._network = network
        self._address = address
        self._num_revocations = 0
        self._memory: TransferMemory | None = None
        self._peers: dict[bytes, MemoryPeer] = {}
        self._lock = threading.Lock()  # of the peers' map
        self._started: tuple[OnMessage, OnPeerLost] | None = None
        self._early: list[bytes] = []

    @property
    def address(self) -> bytes:
        return self._address

    @property
    def put_address(self) -> bytes:
        return b"%b+%d" % (self._address, self._num_revocations)

    def allocate(
        self, num_regions: int, region_bytes: int, blocks_per_region: int
    ) -> TransferMemory:
        num_bytes = num_regions * (-(-region_bytes // _ALIGNMENT) * _ALIGNMENT)
        raw = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        return self._have(raw[start : start + num_bytes], num_regions, blocks_per_region)

    def register(self, buffer: Tensor, num_regions: int, blocks_per_region: int) -> TransferMemory:
        if buffer.device.type != "cpu":
            raise TransportError(f"the memory transport cannot move {buffer.device.type} memory")
        array = np.ctypeslib.as_array(
            (ctypes.c_uint8 * buffer.numel()).from_address(buffer.data_ptr())
        )
        self._registered = buffer  # owns the array's memory
        return self._have(array, num_regions, blocks_per_region)

    def _have(
        self, buffer: npt.NDArray[np.uint8], num_regions: int, blocks_per_region: int
    ) -> TransferMemory:
        assert self._memory is None, "the pool already exists"
        assert len(buffer) % num_regions == 0, (len(buffer), num_regions)
        memory = TransferMemory(num_regions, len(buffer) // num_regions, blocks_per_region)
        rkeys = [b"%b/%d" % (self._address, index) for index in range(num_regions)]
        memory.buffer, memory.regions = buffer, memory.make_regions(buffer.ctypes.data, rkeys)
        self._memory = memory
        return memory

    def start(self, on_message: OnMessage, on_peer_lost: OnPeerLost) -> None:
        assert self._started is None, "already started"
        self._started = (on_message, on_peer_lost)
        early, self._early = self._early, []
        for payload in early:
            self._schedule("message", self._address, partial(on_message, payload), payload)

    def connect(self, address: bytes) -> MemoryPeer:
        with self._lock:
            peer = self._peers.get(address)
            if peer is None:
                peer = self._peers[address] = MemoryPeer(address)
                if self._network.process(address) is None:
                    self._schedule("lost", address, lambda: self._lose(address))
            return peer

    def puts_end_with_process(self, address: bytes) -> bool:
        return not self._network.puts_outlive_connection

    def puts_end_with_revocation(self, address: bytes) -> bool:
        return self._network.puts_outlive_connection

    def revoke_puts(self, on_revoked: OnRevoked) -> None:
        def run() -> None:
            former = self.put_address
            self._num_revocations += 1
            self._network.notice(former)
            self._call(on_revoked)

        self._schedule("revoke", self._address, run)

    def prepare(self, peer: Peer, regions: Sequence[Region]) -> None:
        """Do nothing: there is nothing to map."""

    def put(self, peer: Peer, batch: PutBatch, on_failed: OnFailed) -> None:
        assert isinstance(peer, MemoryPeer)

        def run() -> None:
            error = self._copy(peer, batch)
            if error is not None and not self.dead:
                self._call(partial(on_failed, error))

        self._schedule("put", peer.address, run)

    def flush(self, peer: Peer, on_flushed: OnFlushed) -> None:
        assert isinstance(peer, MemoryPeer)

        def run() -> None:
            is_over = not (peer.lost and self._network.puts_outlive_connection)
            error = "lost the peer" if peer.lost else None
            result = FlushResult(error, peer.busy_s, is_over)
            peer.busy_s = 0.0
            if not self.dead:
                self._call(partial(on_flushed, result))

        self._schedule("flush", peer.address, run)

    def send(self, peer: Peer, payload: bytes, expects_answer: bool = False) -> None:
        assert isinstance(peer, MemoryPeer)

        def run() -> None:
            receiver = self._network.process(peer.address)
            if receiver is not None and not peer.lost and peer.address == receiver.address:
                receiver.receive(payload)

        self._schedule("message", peer.address, run, payload)

    def receive(self, payload: bytes) -> None:
        if self._started is None:
            self._early.append(payload)
        else:
            self._call(partial(self._started[0], payload))

    def schedule_loss(self, address: bytes) -> None:
        """Lose the peer at this address; with a process's own, also that at its put address."""
        for lost in list(self._peers):
            if address in (lost, _owner(lost)):
                self._schedule("lost", lost, partial(self._lose, lost))

    def close(self) -> None:
        if self._network.process(self._address) is self:
            self._network.kill(self._address)
        self._network.reap(self._address)

    def _schedule(
        self,
        kind: Kind,
        target: bytes,
        run: Callable[[], None],
        payload: bytes = b"",
    ) -> None:
        if not self.dead:
            operation = Operation(kind, self._address, target, run, payload)
            self._network.scheduler.schedule(operation)

    def _copy(self, peer: MemoryPeer, batch: PutBatch) -> str | None:
        """Copy the batch. Returns why a put was refused, or None."""
        receiver = self._network.process(peer.address)
        if receiver is None or (peer.lost and not self._network.puts_outlive_connection):
            return None  # as over shared memory: no error is reported
        if peer.address != receiver.put_address:
            return None  # revoked
        assert self._memory is not None
        assert receiver._memory is not None
        start_s = time.perf_counter()
        by_rkey = {region.rkey: region for region in receiver._memory.regions}
        for source, target, length, here, there in batch.runs.coalesced():
            source, target = source + batch.source_offset, target + batch.target_offset
            region = by_rkey.get(batch.runs.path.rkeys[there])
            if region is None:
                return f"no region with rkey {batch.runs.path.rkeys[there]!r}"
            _check_within(self._memory.regions[here], source, length)
            _check_within(region, target, length)
            ctypes.memmove(target, source, length)
        peer.busy_s += time.perf_counter() - start_s
        return None

    def _lose(self, address: bytes) -> None:
        with self._lock:
            peer = self._peers.pop(address, None)
        if peer is not None:
            peer.lost = True
            if self._started is not None and not self.dead:
                self._call(partial(self._started[1], address))

    def _call(self, callback: Callable[[], None]) -> None:
        """Run a callback. A failure ends this process, as it would end a progress thread."""
        try:
            callback()
        except Exception as error:
            log.critical("the transfer thread of %r failed", self._address, exc_info=error)
            if self.on_fatal is None:
                raise
            self._network.kill(self._address)
            self.on_fatal(error)


def _owner(address: bytes) -> bytes:
    """Return the message address of the process that has this address."""
    return address.partition(b"+")[0]
