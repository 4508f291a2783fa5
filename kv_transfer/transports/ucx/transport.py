"""One process's UCX workers and the thread that progresses them.

Life cycle:
1. Created: context, worker and inlet exist, and their addresses are known.
2. `allocate` or `register`: the pool is mapped for UCX.
3. `start`: the progress thread owns both workers from here on. It runs the commands that other
   threads enqueue, progresses UCX, and sleeps until a peer's event or a command's signal wakes it;
   spinning would starve a small machine. If an answer is due soon it polls briefly first, because
   waking up takes as long as the answer. `revoke_puts` replaces the inlet.
4. `close`: the endpoints close, the thread ends, and everything is freed in reverse order.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from ctypes import byref, c_void_p
from dataclasses import replace
from functools import partial

from baton.config.transfer import TransferConfig
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
from kv_transfer.transports.ucx.binding import (
    AM_WHOLE_MESSAGE,
    API_MAJOR,
    API_MINOR,
    FEATURE_AM,
    FEATURE_RMA,
    FEATURE_WAKEUP,
    NO_SHARED_SEGMENT,
    ContextParams,
    ErrorCallback,
    MessageCallback,
    MessageHandlerParams,
    Ucp,
    load,
)
from kv_transfer.transports.ucx.endpoint import (
    SHARED_MEMORY,
    Requests,
    UcxPeer,
    end_with_the_inlet,
    end_with_their_process,
    transports_of,
)
from kv_transfer.transports.ucx.memory import AllocatedMemory, RegisteredMemory, UcxMemory, populate
from kv_transfer.transports.ucx.native import Command, CommandQueue, Put, post_library
from kv_transfer.transports.ucx.worker import UcxWorker

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 1.0
_POLL_S = 200e-6  # an answer takes about 100 us; longer polling would waste a core
_POPULATE_BYTES = 32 << 20  # a few milliseconds


class UcxTransport:
    """The `kv_transfer.transport.Transport` over libucp."""

    def __init__(self, config: TransferConfig) -> None:
        self.on_fatal: OnFatal | None = None
        self._ucp, library = load(config), post_library()
        # Callbacks live as long as the worker: UCX keeps only their raw addresses.
        self._message_callback = MessageCallback(self._receive)
        self._error_callback = ErrorCallback(self._endpoint_failed)
        self._context = _create_context(self._ucp)
        self._worker = UcxWorker(self._ucp, self._context)
        _handle_messages(self._ucp, self._worker.handle, self._message_callback)
        self._inlet = UcxWorker(self._ucp, self._context)
        self._memory: UcxMemory | None = None
        self._commands = CommandQueue(self._ucp, self._worker, library)
        self._requests = Requests(self._ucp)
        self._lock = threading.Lock()  # of the peers' map
        self._signalling = threading.Lock()  # of `_closed`
        self._peers: dict[bytes, UcxPeer] = {}
        self._keys: dict[int, UcxPeer] = {}  # what the error callback is given -> peer
        # Addresses, one for each start of a peer: of those that write the pool themselves, and of
        # those whose puts come through the inlet.
        self._own_writers: set[bytes] = set()
        self._inlet_writers: set[bytes] = set()
        self._failed: deque[UcxPeer] = deque()
        self._message_error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._awake_until_s = 0.0
        self._stopping = False
        self._closed = False

    @property
    def address(self) -> bytes:
        return self._worker.address

    @property
    def put_address(self) -> bytes:
        return self._inlet.address

    @property
    def num_peers(self) -> int:
        """Number of connections that are not fully closed."""
        return len(self._keys)

    @property
    def version(self) -> tuple[int, int, int]:
        return self._ucp.version

    @property
    def transports(self) -> frozenset[str]:
        """UCX's names of the transports that it could use here."""
        return transports_of(self._ucp, self._context)

    def allocate(
        self, num_regions: int, region_bytes: int, blocks_per_region: int
    ) -> TransferMemory:
        return self._have(
            AllocatedMemory(self._ucp, self._context, num_regions, region_bytes, blocks_per_region)
        )

    def register(self, buffer: Tensor, num_regions: int, blocks_per_region: int) -> TransferMemory:
        return self._have(
            RegisteredMemory(self._ucp, self._context, buffer, num_regions, blocks_per_region)
        )

    def _have(self, memory: UcxMemory) -> UcxMemory:
        assert self._memory is None, "the pool already exists"
        assert self._thread is None, "the pool must exist before the transport starts"
        self._memory = memory
        return memory

    def start(self, on_message: OnMessage, on_peer_lost: OnPeerLost) -> None:
        assert self._thread is None, "already started"
        self._on_message, self._on_peer_lost = on_message, on_peer_lost
        self._thread = threading.Thread(target=self._progress, name="kv-transfer", daemon=True)
        self._thread.start()

    def connect(self, address: bytes) -> UcxPeer:
        with self._lock:
            peer = self._peers.get(address)
            if peer is None:
                peer = self._peers[address] = UcxPeer(self._ucp, address)
                self._keys[id(peer)] = peer
                self._enqueue(lambda: self._open(peer))
            return peer

    def puts_end_with_process(self, address: bytes) -> bool:
        return address in self._own_writers

    def puts_end_with_revocation(self, address: bytes) -> bool:
        return address in self._inlet_writers

    def revoke_puts(self, on_revoked: OnRevoked) -> None:
        self._enqueue(partial(self._replace_inlet, on_revoked))

    def prepare(self, peer: Peer, regions: Sequence[Region]) -> None:
        """Map the regions and fault in their pages, one chunk per turn."""
        assert isinstance(peer, UcxPeer)

        def map_region(region: Region) -> None:
            address = peer.mapping(region.rkey, region.base_address)
            if address is not None:
                fault_in(address, region.num_bytes)

        def fault_in(address: int, num_bytes: int) -> None:
            if not peer.is_open:
                return  # the peer is lost, so its memory is no longer mapped
            populate(address, min(num_bytes, _POPULATE_BYTES))
            if num_bytes > _POPULATE_BYTES:
                left = num_bytes - _POPULATE_BYTES
                self._enqueue(partial(fault_in, address + _POPULATE_BYTES, left))

        for region in regions:
            self._enqueue(partial(map_region, region))

    def put(self, peer: Peer, batch: PutBatch, on_failed: OnFailed) -> None:
        assert isinstance(peer, UcxPeer)
        assert self._memory is not None
        handles, rkeys = self._memory.handles, batch.runs.path.rkeys
        target = peer.target(rkeys)
        open_target = partial(peer.open_target, target, handles, rkeys)
        self._enqueue(Put(target, batch, on_failed, open_target))

    def flush(self, peer: Peer, on_flushed: OnFlushed) -> None:
        assert isinstance(peer, UcxPeer)

        def answer(result: FlushResult) -> None:
            if result.error is None:
                on_flushed(result)
                return
            # Puts in flight may be written, or read here, until the endpoint is closed. Over TCP
            # the kernel may deliver what it has taken even later.
            self._lose(peer)
            is_over = end_with_their_process(peer.lanes)
            peer.when_closed(partial(on_flushed, replace(result, is_over=is_over)))

        self._enqueue(lambda: peer.flush(self._requests, answer))

    def send(self, peer: Peer, payload: bytes, expects_answer: bool = False) -> None:
        assert isinstance(peer, UcxPeer)

        def run() -> None:
            if peer.is_open:
                peer.send(self._requests, payload)
                if expects_answer:
                    self._awake_until_s = time.monotonic() + _POLL_S

        if threading.current_thread() is self._thread and not self._commands:
            run()  # an answer, with nothing queued before it
        else:
            self._enqueue(run)

    def close(self) -> None:
        with self._signalling:
            if self._closed:
                return
            self._closed = True
        if self._thread is not None:
            self._stopping = True
            self._worker.signal()
            self._thread.join()
        if self._memory is not None:
            self._memory.free()
        self._inlet.destroy()
        self._worker.destroy()
        self._ucp.ucp_cleanup(self._context)

    # --- the progress thread -------------------------------------------------------------------

    def _enqueue(self, command: Command) -> None:
        if self._commands.add(command):
            with self._signalling:  # so that `close` does not free the worker meanwhile
                if not self._closed:
                    self._worker.signal()

    def _progress(self) -> None:
        try:
            if self._memory is not None:
                self._memory.enter_thread()
            while not self._stopping:
                if not self._turn() and time.monotonic() >= self._awake_until_s:
                    self._ucp.check(self._commands.sleep(self._inlet), "ucp_worker_arm")
            self._close_endpoints()
        except Exception as error:  # the outermost loop of the progress thread
            log.critical("the transfer thread failed", exc_info=error)
            if self.on_fatal is None:
                raise
            self.on_fatal(error)

    def _turn(self) -> bool:
        """Do all pending work once; False if there was none."""
        worked = self._run_commands()
        worked = self._worker.progress() or worked
        worked = self._inlet.progress() or worked
        if self._message_error is not None:
            raise self._message_error
        self._requests.poll()
        while self._failed:
            self._lose(self._failed.popleft())
        return worked or len(self._commands) > 0

    def _run_commands(self) -> bool:
        """Run the commands queued until now. Later ones wait for the next turn, except puts that
        follow puts. False if there was none."""
        commands = self._commands
        begun_at = commands.num_taken
        until = begun_at + len(commands)
        while commands.num_taken < until:
            first = commands.first
            if isinstance(first, Put):
                self._post(first)
            else:
                commands.take()
                first()
        return until > begun_at

    def _post(self, first: Put) -> None:
        """Post the first put and those behind it that can be posted. Drop a put to a lost peer."""
        error = None if first.target.is_open else first.open_target()
        if first.target.is_open:
            status = self._commands.post()
            if status == 0:
                return
            error = f"ucp_put_nbx: {self._ucp.text(status)}"
        failed = self._commands.take()
        assert isinstance(failed, Put), failed
        if error is not None:
            failed.on_failed(error)

    def _open(self, peer: UcxPeer) -> None:
        try:
            peer.open(self._worker.handle, id(peer), self._error_callback)
        except TransportError as error:
            log.warning("cannot reach a peer: %s", error)
            if error.status == NO_SHARED_SEGMENT:  # the segment is gone with its process
                peer.lanes = SHARED_MEMORY
            self._lose(peer)
        if peer.lanes and self._memory is not None and self._memory.is_written_by_peers(peer.lanes):
            self._own_writers.add(peer.address)
        elif end_with_the_inlet(peer.lanes):
            self._inlet_writers.add(peer.address)

    def _replace_inlet(self, on_revoked: OnRevoked) -> None:
        former, self._inlet = self._inlet, UcxWorker(self._ucp, self._context)
        former.destroy()  # after the new one was made: no port is used twice in a row
        on_revoked()

    def _receive(
        self, _arg: int, _header: int, _header_size: int, data: int | None, size: int, _param: int
    ) -> int:
        # Runs inside ucp_worker_progress. UCX owns the bytes, so they are copied.
        self._awake_until_s = 0.0
        try:
            self._on_message(ctypes.string_at(data, size) if data else b"")
        except Exception as error:  # no exception may pass through UCX: `_turn` raises it again
            log.error("cannot handle a transfer message", exc_info=error)
            self._message_error = error
        return 0

    def _endpoint_failed(self, key: int | None, _endpoint: int, status: int) -> None:
        # An endpoint must not be closed inside its own error callback.
        peer = self._keys.get(key or 0)
        if peer is not None and not peer.lost:
            log.warning("lost a transfer peer: %s", self._ucp.text(status))
            self._failed.append(peer)

    def _lose(self, peer: UcxPeer) -> None:
        if not peer.lost:
            self._shut(peer, force=True)
            self._on_peer_lost(peer.address)

    def _shut(self, peer: UcxPeer, force: bool) -> None:
        peer.lost = True
        with self._lock:
            if self._peers.get(peer.address) is peer:
                del self._peers[peer.address]
        peer.close(self._requests, force, lambda: self._keys.pop(id(peer)))

    def _close_endpoints(self) -> None:
        """Finish requests in flight, then close. A peer that does not answer costs a second."""
        self._drain_requests(time.monotonic() + _CLOSE_TIMEOUT_S)
        for peer in list(self._peers.values()):
            self._shut(peer, force=False)
        self._drain_requests(time.monotonic() + _CLOSE_TIMEOUT_S)

    def _drain_requests(self, deadline_s: float) -> None:
        while time.monotonic() < deadline_s:
            worked = self._turn()
            if not worked and not self._requests:
                return


def _create_context(ucp: Ucp) -> int:
    """Create a context whose workers can put, receive puts, send messages and sleep."""
    config, context = c_void_p(), c_void_p()
    ucp.check(ucp.ucp_config_read(None, None, byref(config)), "ucp_config_read")
    features = FEATURE_RMA | FEATURE_WAKEUP | FEATURE_AM
    # ucp_init is inline in UCX's header and passes the header's version. Here it is the version of
    # the structures.
    status = ucp.ucp_init_version(
        API_MAJOR,
        min(API_MINOR, ucp.version[1]),
        byref(ContextParams(field_mask=1, features=features)),
        config,
        byref(context),
    )
    ucp.ucp_config_release(config)
    ucp.check(status, "ucp_init_version")
    assert context.value is not None
    return context.value


def _handle_messages(ucp: Ucp, worker: int, on_message: object) -> None:
    handler = MessageHandlerParams(
        field_mask=1 | 2 | 4, id=0, flags=AM_WHOLE_MESSAGE, callback=on_message
    )
    status = ucp.ucp_worker_set_am_recv_handler(worker, byref(handler))
    ucp.check(status, "ucp_worker_set_am_recv_handler")
