"""One peer as the progress thread sees it: its UCX endpoint, its rkeys, what it costs."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_void_p
from functools import partial
from typing import Any

from kv_transfer.errors import TransportError
from kv_transfer.transport import FlushResult, OnFlushed
from kv_transfer.ucx.binding import (
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
from kv_transfer.ucx.lanes import lanes_of
from kv_transfer.ucx.native import PutTarget

_PLAIN = RequestParams()
_EAGER = RequestParams(op_attr_mask=OP_ATTR_FLAGS, flags=AM_SEND_EAGER)

OnComplete = Callable[[str | None], None]


def _sent(_payload: bytes, _error: str | None) -> None:
    """Bound to a payload, keeps it alive until UCX has taken it."""


class Requests:
    """UCX requests under way, each with what to do when it ends and what must live until then."""

    def __init__(self, ucp: Ucp) -> None:
        self._ucp = ucp
        self._open: list[tuple[int, OnComplete]] = []

    def __len__(self) -> int:
        return len(self._open)

    def track(self, pointer: int | None, on_complete: OnComplete) -> None:
        """Call `on_complete` with None or an error's text: now, or once the request ends."""
        status = pointer_status(pointer)
        if status == IN_PROGRESS:
            assert pointer is not None
            self._open.append((pointer, on_complete))
        else:
            on_complete(None if status == 0 else self._ucp.text(status))

    def poll(self) -> None:
        """Complete those that have ended, in the order they were begun."""
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
    """The handle callers hold. Its endpoint is made by the progress thread, at first use."""

    def __init__(self, address: bytes) -> None:
        self.address = address
        self.endpoint: Endpoint | None = None
        self.lost = False
        self.lanes: frozenset[str] = frozenset()
        """The transports its endpoint goes over, or went; none before it was made."""
        self.is_closed = False
        """Its endpoint is gone: nothing can be written through it, nor read for it, any more."""
        self._targets: dict[tuple[bytes, ...], PutTarget] = {}  # by the regions' rkeys
        self._waiting: list[Callable[[], None]] = []

    def target(self, rkeys: tuple[bytes, ...]) -> PutTarget:
        """Where puts under these keys go. Any thread."""
        found = self._targets.get(rkeys)
        return found if found is not None else self._targets.setdefault(rkeys, PutTarget())

    def take_busy_s(self) -> float:
        """Seconds that posting to it has cost since the last call."""
        return sum(target.take_busy_s() for target in list(self._targets.values()))

    def close_targets(self) -> None:
        """Nothing is posted to it any more."""
        for target in list(self._targets.values()):
            target.close()

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Now, or once it is closed."""
        if self.is_closed:
            callback()
        else:
            self._waiting.append(callback)

    def closed(self) -> None:
        self.is_closed = True
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()


class Endpoint:
    """A UCX endpoint in PEER error mode. Progress thread only. Raises TransportError when made."""

    def __init__(self, ucp: Ucp, worker: int, address: bytes, key: int, on_error: Any) -> None:
        self._ucp = ucp
        self._rkeys: dict[bytes, int] = {}
        handle = c_void_p()
        params = EndpointParams(
            field_mask=1 | 2 | 4,
            address=ctypes.cast(ctypes.c_char_p(address), c_void_p),
            error_mode=ERROR_MODE_PEER,
            error_callback=on_error,
            error_argument=key,
        )
        ucp.check(ucp.ucp_ep_create(worker, byref(params), byref(handle)), "ucp_ep_create")
        assert handle.value is not None
        self._handle = handle.value
        self.lanes = lanes_of(ucp, self._handle)

    def open(
        self, target: PutTarget, memory_handles: Sequence[int], rkeys: Sequence[bytes]
    ) -> str | None:
        """Let puts under these keys of the peer be posted; why a key is refused, if one is."""
        try:
            unpacked = [self._rkey(packed) for packed in rkeys]
        except TransportError as error:
            return str(error)
        target.open(self._handle, memory_handles, unpacked)
        return None

    def mapping(self, packed_rkey: bytes, address: int) -> int | None:
        """Where the peer's memory is mapped here; None: it is not, or was asked before, or its key
        is refused, which the first put will tell."""
        if packed_rkey in self._rkeys:
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
        status = self._ucp.ucp_ep_rkey_unpack(self._handle, packed, byref(rkey))
        self._ucp.check(status, "ucp_ep_rkey_unpack")
        assert rkey.value is not None
        self._rkeys[packed] = rkey.value
        return rkey.value

    def flush(self, requests: Requests, posting_s: float, on_flushed: OnFlushed) -> None:
        """Even after a refused put: those before it may still be under way. `posting_s`: what the
        puts have cost already."""
        start_s = time.perf_counter()

        def complete(flush_error: str | None) -> None:
            on_flushed(FlushResult(flush_error, posting_s + time.perf_counter() - start_s))

        requests.track(self._ucp.ucp_ep_flush_nbx(self._handle, byref(_PLAIN)), complete)

    def send(self, requests: Requests, payload: bytes) -> None:
        """Eager whatever its size, so that the receiver gets it whole and answers nothing."""
        pointer = self._ucp.ucp_am_send_nbx(
            self._handle, 0, None, 0, payload, len(payload), byref(_EAGER)
        )
        # A failure needs no report of its own: the error callback tells that the peer is lost.
        requests.track(pointer, partial(_sent, payload))

    def close(self, requests: Requests, force: bool, on_closed: Callable[[], None]) -> None:
        """Puts under way use their rkeys until the close has ended, however it ends."""

        def end(_error: str | None) -> None:
            for rkey in self._rkeys.values():
                self._ucp.ucp_rkey_destroy(rkey)
            self._rkeys.clear()
            on_closed()

        params = RequestParams(op_attr_mask=OP_ATTR_FLAGS, flags=EP_CLOSE_FORCE if force else 0)
        requests.track(self._ucp.ucp_ep_close_nbx(self._handle, byref(params)), end)
