"""One end of a link: frames in and out, and the other side's silence."""

from __future__ import annotations

import asyncio
import enum
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2

from baton.errors import BatonError
from baton.identity.keys import Role
from baton.status import DETAILS_KEY
from baton.unfinished import Unfinished
from baton.v1 import common_pb2, worker_pb2

_HEADER = struct.Struct("<IBI")
VERSION = b"baton link 2"
NONCE_BYTES = 32
_HELLO = struct.Struct(f"<{len(VERSION)}sf{NONCE_BYTES}s")
AS_WORKER, AS_CALLER = "baton link worker", "baton link caller"
"""The purposes for which each side signs the nonces of both."""
_LOW_BYTES, _HIGH_BYTES = 16 << 10, 64 << 10  # of the buffer: when `room` is given, and taken
MAX_FRAME_BYTES = 256 << 20
"""Most bytes of a worker's frame, which its router trusts. A longer one ends the connection."""
MAX_STRANGERS_BYTES = 1 << 10
"""Most bytes of a frame until it is known who is there."""
TOKENS_ROOM, OTHERS_ROOM = 1 << 20, _HIGH_BYTES
"""Unsent bytes up to which more is taken: tokens go before all else."""
_LOOK_S = 0.01
NO_CALL = 0
"""The number in a frame of no call. END with it refuses the link."""


class Kind(enum.IntEnum):
    HELLO = 1
    WELCOME = 2
    CALL = 3
    MESSAGE = 4
    END = 5
    CANCEL = 6
    PING = 7
    CHALLENGE = 8
    PROOF = 9


class Method(enum.IntEnum):
    """What is asked of a worker. A session ends with its connection."""

    SESSION = 1
    PREFILL = 2
    ATTACH = 3
    FOLLOW_KV = 4
    CANCEL = 5
    READ_TOKENIZER = 6
    LOAD = 7
    DRAIN = 8
    CHECK_INTEGRITY = 9


_ROUTERS: frozenset[Role] = frozenset({"router"})
_POD_TOO: frozenset[Role] = frozenset({"operator", "worker"})  # a pod drains itself
CALLERS: dict[Method, frozenset[Role]] = {
    Method.SESSION: _ROUTERS,
    Method.PREFILL: _ROUTERS,
    Method.ATTACH: _ROUTERS,
    Method.FOLLOW_KV: _ROUTERS,
    Method.CANCEL: _ROUTERS,
    Method.READ_TOKENIZER: _ROUTERS,
    Method.LOAD: _POD_TOO,
    Method.DRAIN: _POD_TOO,
    Method.CHECK_INTEGRITY: frozenset({"operator"}),
}
"""The roles that may make each call."""
NUMBERS = frozenset(Method)
MESSAGES: dict[Method, tuple[type[Message], type[Message]]] = {
    Method.SESSION: (worker_pb2.SessionRequest, worker_pb2.SessionResponse),
    Method.PREFILL: (worker_pb2.PrefillRequest, worker_pb2.PrefillResponse),
    Method.ATTACH: (worker_pb2.AttachRequest, worker_pb2.AttachResponse),
    Method.CANCEL: (worker_pb2.Cancel, worker_pb2.CancelResponse),
    Method.FOLLOW_KV: (worker_pb2.SubscribeKvRequest, worker_pb2.SubscribeKvResponse),
    Method.READ_TOKENIZER: (worker_pb2.ReadTokenizerRequest, worker_pb2.ReadTokenizerResponse),
    Method.LOAD: (worker_pb2.LoadRequest, worker_pb2.LoadResponse),
    Method.DRAIN: (worker_pb2.DrainRequest, worker_pb2.DrainResponse),
    Method.CHECK_INTEGRITY: (worker_pb2.CheckIntegrityRequest, worker_pb2.CheckIntegrityResponse),
}


def link_name(ref: common_pb2.WorkerRef) -> str:
    """Name the start of a worker that a caller means. Another one, to which somebody passes the
    connection on, refuses it."""
    return f"{ref.worker_id}/{ref.incarnation}"


@dataclass(frozen=True)
class Hello:
    """A link's first frame."""

    keepalive_s: float
    nonce: bytes
    role: str
    """The caller's role."""
    worker: str = ""
    """The `link_name` of the worker that is meant; empty: whoever listens."""

    def to_bytes(self) -> bytes:
        fixed = _HELLO.pack(VERSION, self.keepalive_s, self.nonce)
        return fixed + f"{self.role} {self.worker}".encode()

    @classmethod
    def read(cls, payload: bytes) -> Hello:
        """Read a HELLO. Raises ValueError."""
        if not payload.startswith(VERSION) or len(payload) < _HELLO.size:
            raise ValueError(f"it speaks {payload[:40]!r}")
        _, keepalive_s, nonce = _HELLO.unpack_from(payload)
        role, _, worker = payload[_HELLO.size :].decode().partition(" ")
        return cls(keepalive_s, nonce, role, worker)


class LinkError(Exception):
    """A call ended at its worker, or with the connection (UNAVAILABLE). It has `code`, `details`
    and `trailing_metadata`, as gRPC's errors have."""

    def __init__(self, code: grpc.StatusCode, details: str, status: bytes = b"") -> None:
        super().__init__(f"{code.name}: {details}")
        self._code, self._details, self._status = code, details, status

    def to_bytes(self) -> bytes:
        """Write the error as END carries it: the code and a google.rpc.Status."""
        code = self._code.value[0]
        plain = status_pb2.Status(code=code, message=self._details)
        return bytes((code,)) + (self._status or plain.SerializeToString())

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((DETAILS_KEY, self._status),) if self._status else ()


class Frames(asyncio.Protocol, ABC):
    """One end of a connection."""

    def __init__(self, keepalive_s: float, unfinished: Unfinished | None = None) -> None:
        """Serve one connection. `unfinished` is the budget for frames of which a part has come."""
        self._keepalive_s, self._unfinished = keepalive_s, unfinished
        self._transport: asyncio.WriteTransport | None = None
        self._received = bytearray()
        self._has_heard = self._has_sent = True
        self._num_silent = 0  # ticks in a row
        self._tick: asyncio.TimerHandle | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._longest_bytes = MAX_STRANGERS_BYTES

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    # --- asyncio's callbacks -------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=_HIGH_BYTES, low=_LOW_BYTES)
        loop = asyncio.get_running_loop()
        self._tick = loop.call_later(self._keepalive_s / 2, self._on_tick)

    def pause_writing(self) -> None:
        self._resumed.clear()

    def resume_writing(self) -> None:
        self._resumed.set()

    def data_received(self, data: bytes) -> None:
        self._has_heard = True
        received = self._received
        received += data
        at = 0
        while len(received) - at >= _HEADER.size:
            length, kind, call = _HEADER.unpack_from(received, at)
            if length > (most := self._longest_bytes):
                return self.close(f"a frame of {length} bytes is longer than {most}")
            end = at + _HEADER.size + length
            if end > len(received):
                break
            payload = bytes(received[at + _HEADER.size : end])
            at = end
            try:
                self._on_frame(kind, call, payload)
            except (DecodeError, ValueError) as error:
                return self.close(f"a frame cannot be read: {error}")
            if self._transport is None:
                return None
        del received[:at]
        if self._unfinished is not None:
            if at:
                self._unfinished.let_go(self)
            if received:
                self._unfinished.hold(self, len(received) if at else len(data))
        return None

    def give_way(self, error: BatonError) -> None:
        self.close(error.message)

    def connection_lost(self, error: Exception | None) -> None:
        if self._tick is not None:
            self._tick.cancel()
        if self._unfinished is not None:
            self._unfinished.let_go(self)
        self._received.clear()
        was_open, self._transport = self._transport is not None, None
        self._resumed.set()
        if was_open:
            self._on_lost(str(error or "the other side closed the connection"))

    # --- sending -------------------------------------------------------------------------------

    def _send(self, kind: Kind, call: int = NO_CALL, payload: bytes = b"") -> None:
        if self._transport is not None:
            self._has_sent = True
            self._transport.write(_HEADER.pack(len(payload), kind, call) + payload)

    async def room(self, num_bytes: int) -> None:
        """Wait until no more than this is unsent, or the connection is lost."""
        while self.num_unsent > num_bytes:
            if self._resumed.is_set():  # below the marks at which the transport says so
                await asyncio.sleep(_LOOK_S)
            await self._resumed.wait()
            if self._transport is None:
                return

    @property
    def num_unsent(self) -> int:
        """Return the bytes that are unsent."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self, why: str) -> None:
        """Cut the connection; what is unsent is lost."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
            self._on_lost(why)

    def _on_tick(self) -> None:
        """Send a ping or give the peer up, twice in `keepalive_s`. Silence is counted in ticks: a
        process that stood still has seen one of them."""
        self._num_silent = 0 if self._has_heard else self._num_silent + 1
        if self._num_silent >= 4:
            return self.close(f"nothing was heard for {2 * self._keepalive_s:g} s")
        if not self._has_sent:
            self._send(Kind.PING)
        self._has_heard = self._has_sent = False
        if self._tick is not None:
            self._tick.cancel()
        loop = asyncio.get_running_loop()
        self._tick = loop.call_later(self._keepalive_s / 2, self._on_tick)
        return None

    # --- of either side ------------------------------------------------------------------------

    @abstractmethod
    def _on_frame(self, kind: int, call: int, payload: bytes) -> None: ...

    @abstractmethod
    def _on_lost(self, why: str) -> None: ...
