"""One peer: its UCX endpoint, rkeys, lanes and cost.

A lane is a transport that UCX has chosen between two processes. Over shared memory a put is a copy
by the writer's own threads, so none is left when the process has ended. Over TCP the kernel
delivers what it has taken, and the receiver's progress thread writes it whenever it reads it. Both
ends choose alike: an address lists the transports of its process, and each end weighs what both
list.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_size_t, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

from kv_transfer.errors import TransportError
from kv_transfer.transport import FlushResult, OnFlushed
from kv_transfer.transports.ucx.binding import (
    AM_SEND_EAGER,
    EP_CLOSE_FORCE,
    ERROR_MODE_PEER,
    IN_PROGRESS,
    OP_ATTR_FLAGS,
    EndpointParams,
    RequestParams,
    Ucp,
    pointer_status,
)
from kv_transfer.transports.ucx.native import PutTarget

SHARED_MEMORY = frozenset({"sysv", "posix", "xpmem", "self"})
CUDA_COPIES = frozenset({"cuda_ipc", "cuda_copy", "gdr_copy"})
RECEIVED = frozenset({"tcp", "rc_verbs", "rc_mlx5", "dc_mlx5", "ud_verbs", "ud_mlx5"})
"""Transports whose puts need a socket or queue pair of the receiver."""

_RESOURCE = re.compile(r"resource \d+ .* -- (\w+)/")
_LANE = re.compile(r"lane\[\d+\]: +\d+:(\w+)/")
_libc = ctypes.CDLL(None)
_libc.open_memstream.restype = c_void_p
_libc.fclose.argtypes = [c_void_p]
_libc.free.argtypes = [c_void_p]


def lanes_of(ucp: Ucp, endpoint: int) -> frozenset[str]:
    """Name the transports of an endpoint's lanes; "?" for a lane that cannot be read.

    Parsed from the endpoint's printed description: UCX 1.13's `ucp_ep_query` does not return them.
    """
    lines = _printed(ucp.ucp_ep_print_info, endpoint)
    found = [_LANE.search(line) for line in lines if "lane[" in line]
    return frozenset(lane[1] if lane else "?" for lane in found) or frozenset({"?"})


def transports_of(ucp: Ucp, context: int) -> frozenset[str]:
    """Name the transports that this process could use, given its devices and settings."""
    found = (_RESOURCE.search(line) for line in _printed(ucp.ucp_context_print_info, context))
    return frozenset(resource[1] for resource in found if resource)


def _printed(write: Callable[[int, int], None], of: int) -> list[str]:
    """Return the lines that one of UCX's functions prints to a stream; empty when out of memory."""
    text, size = c_void_p(), c_size_t()
    stream = _libc.open_memstream(byref(text), byref(size))
    if not stream:
        return []
    write(of, stream)
    _libc.fclose(stream)
    lines = ctypes.string_at(text.value or 0, size.value).decode(errors="replace").splitlines()
    _libc.free(text)
    return lines


def end_with_their_process(lanes: frozenset[str]) -> bool:
    """Whether no put over these lanes can land after its process has ended."""
    return lanes <= SHARED_MEMORY | CUDA_COPIES


def end_with_the_inlet(lanes: frozenset[str]) -> bool:
    """Whether no put over these lanes can land after the receiver has destroyed its inlet. What is
    received for a GPU's memory is copied there by the receiver itself."""
    return bool(lanes & RECEIVED) and lanes <= RECEIVED | {"cuda_copy", "gdr_copy"}


def is_shared(address: int) -> bool:
    """Whether this address lies in a shared mapping."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions = line.split()[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return permissions.endswith("s")
    return False


_PLAIN = RequestParams()
_EAGER = RequestParams(op_attr_mask=OP_ATTR_FLAGS, flags=AM_SEND_EAGER)

OnComplete = Callable[[str | None], None]


def _sent(_payload: bytes, _error: str | None) -> None:
    """Does nothing; bound to a payload, it keeps the payload alive until UCX has sent it."""


class Requests:
    """Open UCX requests, each with its completion callback, which also keeps its buffers alive."""

    def __init__(self, ucp: Ucp) -> None:
        self._ucp = ucp
        self._open: list[tuple[int, OnComplete]] = []

    def __len__(self) -> int:
        return len(self._open)

    def track(self, pointer: int | None, on_complete: OnComplete) -> None:
        """Call `on_complete` with None or an error text: now, or when the request ends."""
        status = pointer_status(pointer)
        if status == IN_PROGRESS:
            assert pointer is not None
            self._open.append((pointer, on_complete))
        else:
            on_complete(None if status == 0 else self._ucp.text(status))

    def poll(self) -> None:
        """Complete the requests that have ended, in the order they began."""
        if not self._open:
            return
        begun, self._open = self._open, []
        for pointer, on_complete in begun:
            status = self._ucp.ucp_request_check_status(pointer)
            if status == IN_PROGRESS:
                self._open.append((pointer, on_complete))
                continue
            self._ucp.ucp_request_free(pointer)
            on_complete(None if status == 0 else self._ucp.text(status))


class UcxPeer:
    """The handle that callers hold, and its UCX endpoint in PEER error mode. The progress thread
    opens the endpoint, uses it and closes it; `target` may be called from any thread."""

    def __init__(self, ucp: Ucp, address: bytes) -> None:
        self.address = address
        self.lost = False
        self.lanes: frozenset[str] = frozenset()
        """The transports that its endpoint uses or used; empty before it was opened."""
        self.is_closed = False
        """Its endpoint is closed: nothing can be written through it or read for it any more."""
        self._ucp = ucp
        self._endpoint: int | None = None
        self._rkeys: dict[bytes, int] = {}
        self._targets: dict[tuple[bytes, ...], PutTarget] = {}  # by the regions' rkeys
        self._waiting: list[Callable[[], None]] = []

    @property
    def is_open(self) -> bool:
        return self._endpoint is not None

    def open(self, worker: int, key: int, on_error: Any) -> None:
        """Create the endpoint. Raises TransportError."""
        endpoint = c_void_p()
        params = EndpointParams(
            field_mask=1 | 2 | 4,
            address=ctypes.cast(ctypes.c_char_p(self.address), c_void_p),
            error_mode=ERROR_MODE_PEER,
            error_callback=on_error,
            error_argument=key,
        )
        status = self._ucp.ucp_ep_create(worker, byref(params), byref(endpoint))
        self._ucp.check(status, "ucp_ep_create")
        assert endpoint.value is not None
        self._endpoint = endpoint.value
        self.lanes = lanes_of(self._ucp, self._endpoint)

    def target(self, rkeys: tuple[bytes, ...]) -> PutTarget:
        """Return the target of puts under these keys. Any thread."""
        found = self._targets.get(rkeys)
        return found if found is not None else self._targets.setdefault(rkeys, PutTarget())

    def open_target(
        self, target: PutTarget, memory_handles: Sequence[int], rkeys: Sequence[bytes]
    ) -> str | None:
        """Let puts under these keys be posted, if the endpoint is open. Returns why a key was
        refused, or None."""
        if self._endpoint is None:
            return None
        try:
            unpacked = [self._rkey(packed) for packed in rkeys]
        except TransportError as error:
            return str(error)
        target.open(self._endpoint, memory_handles, unpacked)
        return None

    def mapping(self, packed_rkey: bytes, address: int) -> int | None:
        """Map the peer's memory, and return its local address. None: not open, not mapped, already
        asked for, or its key was refused (the first put reports that)."""
        if self._endpoint is None or packed_rkey in self._rkeys:
            return None
        local = c_void_p()
        try:
            status = self._ucp.ucp_rkey_ptr(self._rkey(packed_rkey), address, byref(local))
        except TransportError:
            return None
        return local.value if status == 0 else None

    def _rkey(self, packed: bytes) -> int:
        known = self._rkeys.get(packed)
        if known is not None:
            return known
        rkey = c_void_p()
        status = self._ucp.ucp_ep_rkey_unpack(self._endpoint, packed, byref(rkey))
        self._ucp.check(status, "ucp_ep_rkey_unpack")
        assert rkey.value is not None
        self._rkeys[packed] = rkey.value
        return rkey.value

    def flush(self, requests: Requests, on_flushed: OnFlushed) -> None:
        """Flush, even after a refused put: earlier ones may be in flight."""
        if self._endpoint is None:
            on_flushed(FlushResult("lost the peer", 0.0))
            return
        posting_s = sum(target.take_busy_s() for target in list(self._targets.values()))
        start_s = time.perf_counter()

        def complete(flush_error: str | None) -> None:
            on_flushed(FlushResult(flush_error, posting_s + time.perf_counter() - start_s))

        requests.track(self._ucp.ucp_ep_flush_nbx(self._endpoint, byref(_PLAIN)), complete)

    def send(self, requests: Requests, payload: bytes) -> None:
        """Send eagerly at any size, so that the receiver gets it whole without a rendezvous."""
        pointer = self._ucp.ucp_am_send_nbx(
            self._endpoint, 0, None, 0, payload, len(payload), byref(_EAGER)
        )
        # A failure needs no report here: the error callback reports the peer as lost.
        requests.track(pointer, partial(_sent, payload))

    def close(self, requests: Requests, force: bool, on_closed: Callable[[], object]) -> None:
        """Stop posting and close; puts in flight use their rkeys until the close has ended."""
        for target in list(self._targets.values()):
            target.close()

        def end(_error: str | None) -> None:
            for rkey in self._rkeys.values():
                self._ucp.ucp_rkey_destroy(rkey)
            self._rkeys.clear()
            self.is_closed = True
            on_closed()
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                callback()

        endpoint, self._endpoint = self._endpoint, None
        if endpoint is None:
            end(None)
            return
        params = RequestParams(op_attr_mask=OP_ATTR_FLAGS, flags=EP_CLOSE_FORCE if force else 0)
        requests.track(self._ucp.ucp_ep_close_nbx(endpoint, byref(params)), end)

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Call `callback` now, or once the peer is closed."""
        if self.is_closed:
            callback()
        else:
            self._waiting.append(callback)
