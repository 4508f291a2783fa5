"""gRPC over HTTP/2, in this process's event loop. Frames in, HPACK and flow control are h2's; DATA
frames out are written here, since h2 takes ten times as long for each.

Nothing waits for a task: what arrives is handed to its call as it is read. What goes out is
gathered, and written once a round of the loop, while the windows and the transport's buffer have
room. A call that finds none keeps what it has, and takes no more from its source.

A connection that breaks HTTP/2's rules, or costs more than it is worth (`Allowance`), ends alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import Callable, Mapping
from typing import Any

from grpc import StatusCode
from h2.config import H2Configuration
from h2.connection import ConnectionInputs, H2Connection, H2ConnectionStateMachine
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingAckReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import DenialOfServiceError, ProtocolError, StreamClosedError
from h2.settings import SettingCodes, Settings

from router.door.connections.acceptor import SHUT_WITHIN_S, Acceptor
from router.door.connections.sharing import Allowance, Sharing
from router.door.grpc.call import MAX_METADATA_BYTES, Call, Handler, Headers, Status
from router.door.grpc.call_policy import CallPolicy
from router.door.grpc.h2_input import MAX_HEADER_BYTES, H2Input

log = logging.getLogger(__name__)

_DATA = struct.Struct(">IBI")  # length and type, flags, stream
_MAX_STREAMS = 4000
_WINDOW_BYTES = 1 << 20  # of a request that comes in
_GATHERED_BYTES = 64 << 10
_LOW_BYTES, _HIGH_BYTES = 16 << 10, 64 << 10  # of the transport's buffer
_MAX_UNREAD_BYTES = 1 << 20  # of answers to PING and SETTINGS that a peer does not read
_MAX_WAITING_BYTES = 64 << 10  # of input, until its next turn
# In small frames of input: what a call brings its connection, and what it costs if it is reset
# before anything was sent. HEADERS cost 8.
_OF_CALL, _OF_REFUSAL, _OF_RESET, _OF_SENT = 16, 8, 9, 3
_KNOWN_SETTINGS = frozenset[int](SettingCodes)
_REQUEST_WITHIN_S = 60.0
_CLOSES_WITHIN_S = 5.0
_KEEPALIVE, _GOING = b"keepaliv", b"go away "


class _States(H2ConnectionStateMachine):
    """h2's, but that GOAWAY lets streams that run go on, as HTTP/2 has it."""

    def process_input(self, input_: ConnectionInputs) -> list[Event]:
        if input_ in (ConnectionInputs.SEND_GOAWAY, ConnectionInputs.RECV_GOAWAY):
            return []
        return super().process_input(input_)


class _H2(H2Connection):
    """h2's, but that a new stream does not make it look at all that are there."""

    _num_begun = 0

    @property
    def open_inbound_streams(self) -> int:
        """Return no fewer than there are. Now and then, look, and forget the closed ones."""
        self._num_begun += 1
        if self._num_begun % 64 and len(self.streams) < _MAX_STREAMS:
            return len(self.streams)
        return super().open_inbound_streams


class _ClientSettings(Settings):
    """h2's, but bounded: what HTTP/2 knows alone, and no table of headers to search at length."""

    def __setitem__(self, key: SettingCodes | int, value: int) -> None:
        if key == SettingCodes.HEADER_TABLE_SIZE:
            value = min(value, 4096)  # HTTP/2's default
        if key in _KNOWN_SETTINGS:
            super().__setitem__(key, value)


def _new_h2() -> H2Connection:
    h2 = _H2(_CONFIG)
    h2.state_machine = _States()
    h2.local_settings = Settings(client=False, initial_values=_SETTINGS)
    h2.remote_settings = _ClientSettings(client=True)
    h2.decoder.max_header_list_size = MAX_HEADER_BYTES
    h2.initiate_connection()
    h2.increment_flow_control_window(_WINDOW_BYTES)
    return h2


class Connection(asyncio.Protocol):
    """Own one client's connection and its calls."""

    def __init__(self, server: GrpcServer) -> None:
        self._server, self._policy = server, server.policy
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_open = False
        self._h2 = _new_h2()
        self._calls: dict[int, Call] = {}
        self._callers_own: dict[int, Call] = {}
        """Of them those that not just anyone may make: for these the connection stays."""
        self._due: list[Call] = []
        self._blocked: set[Call] = set()  # by a window
        self._out: list[bytes | memoryview] = []
        self._num_out = 0
        self._is_paused = False
        self._will_flush = False
        """`_flush` is called before long, or runs."""
        self._input = H2Input()
        self._allowance = Allowance()
        self._is_waiting = False
        """Whether there is input for another turn."""
        self._stopped_reading = False
        self.unfinished = server.sharing.unfinished
        self.arriving: asyncio.Task[None] | None = None
        self._has_heard = True
        self._num_silent = 0  # ticks in a row
        self._tick: asyncio.TimerHandle | None = None
        self._last_id: int | None = None  # after GOAWAY: of the last stream that is served
        self._knows = False  # the peer has read our GOAWAY

    # --- asyncio's callbacks -------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport, self._is_open = transport, True
        self._server.connections.add(self)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            return self.cut()
        transport.set_write_buffer_limits(high=_HIGH_BYTES, low=_LOW_BYTES)
        self._write()
        self._tick = self._loop.call_later(self._policy.keepalive_s, self._on_tick)
        if self._server.is_stopping:
            self.go_away()
        return None

    def data_received(self, data: bytes) -> None:
        if not self._is_open or self._transport is None:
            return
        self._has_heard = True
        self._input += data
        if not self._is_waiting:
            self._is_waiting = self._server.sharing.turns.take(self._take_turn)
        if self._is_waiting and len(self._input) > _MAX_WAITING_BYTES and self._is_open:
            self._stopped_reading = True
            self._transport.pause_reading()

    def _take_turn(self) -> bool:
        """Read a piece of the input. False: there is no more."""
        try:
            self._is_waiting = self._is_open and self._receive() and self._is_open
        except BaseException:  # nobody knows what it has read
            self.cut()
            raise
        transport = self._transport
        if self._stopped_reading and not self._is_waiting and transport is not None:
            self._stopped_reading = False
            if not transport.is_closing():
                transport.resume_reading()
        return self._is_waiting

    def _receive(self) -> bool:
        self._will_flush = True
        try:
            data, cost = self._input.piece()
            if not self._allowance.spend(cost):
                raise DenialOfServiceError("too much that serves no call")
            for event in self._h2.receive_data(data):
                handler = _HANDLERS.get(type(event))
                if handler is not None:
                    handler(self, event)
                    if not self._is_open:
                        return False
        except ProtocolError as error:
            self._server.sharing.note_ended(str(error))
            self.leave(error.error_code, str(error))
        else:
            self._flush()
        return self._input.has_more

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._forget_all()
        self._server.lose(self)

    # --- frames that came ----------------------------------------------------------------------

    def _on_request(self, event: RequestReceived) -> None:
        stream_id, headers = event.stream_id, event.headers
        assert stream_id is not None
        if self._last_id is not None and stream_id > self._last_id:
            return self._reset(stream_id, ErrorCodes.REFUSED_STREAM)
        call = self._calls[stream_id] = Call(self, stream_id, self._policy)
        call.begin(headers, self._server.methods)
        if call.is_admitted and not call.is_open:
            self._callers_own[stream_id] = call
        is_refused = call.is_due or not call.is_admitted  # due: it has ended already
        self._allowance.earn(_OF_REFUSAL if is_refused else _OF_CALL)
        return None

    def _on_data(self, event: DataReceived) -> None:
        assert event.stream_id is not None
        num_bytes = event.flow_controlled_length or 0
        if not num_bytes:
            return
        self._h2.acknowledge_received_data(num_bytes, event.stream_id)
        call = self._calls.get(event.stream_id)
        if call is not None and event.data:
            self._allowance.earn(len(event.data) >> 8)
            call.on_data(event.data)

    def _on_end(self, event: StreamEnded) -> None:
        call = self._calls.get(event.stream_id or 0)
        if call is not None:
            call.on_end()

    def _on_reset(self, event: StreamReset) -> None:
        call = self._calls.pop(event.stream_id or 0, None)
        self._callers_own.pop(event.stream_id or 0, None)
        if call is None or not call.has_opened:
            self._allowance.spend(_OF_RESET)  # who exceeds it hears of it with the next frame
        if call is not None:
            self._drop(call)

    def _on_window(self, event: WindowUpdated) -> None:
        if not self._blocked:
            return
        if event.stream_id:
            call = self._calls.get(event.stream_id)
            if call in self._blocked:
                self._blocked.discard(call)
                self.soon(call)
        else:
            self._unblock()

    def _on_settings(self, event: RemoteSettingsChanged) -> None:
        if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
            self._unblock()

    def _unblock(self) -> None:
        blocked, self._blocked = self._blocked, set()
        for call in blocked:
            self.soon(call)

    def _on_pong(self, event: PingAckReceived) -> None:
        if event.ping_data == _GOING:
            self._knows = True
            self._close_if_done()

    def _on_terminated(self, event: ConnectionTerminated) -> None:
        """Take no more streams: the client opens none."""
        if event.error_code:
            return self._close()
        self._last_id, self._knows = self._h2.highest_inbound_stream_id, True
        self._close_if_done()
        return None

    # --- what calls ask for --------------------------------------------------------------------

    def soon(self, call: Call) -> None:
        call.is_due = True
        self._due.append(call)
        self._flush_soon()

    def own(self, task: asyncio.Task[None]) -> None:
        self._server.own(task)

    def send(self, stream_id: int, data: bytes | memoryview) -> int:
        h2 = self._h2
        stream = h2.streams[stream_id]
        room = min(
            stream.outbound_flow_control_window,
            h2.outbound_flow_control_window,
            0 if self._is_paused else _GATHERED_BYTES - self._num_out,
        )
        num_taken = max(0, min(len(data), room))
        size = h2.max_outbound_frame_size
        for start in range(0, num_taken, size):
            piece = data[start : min(start + size, num_taken)]
            self._out += (_DATA.pack(len(piece) << 8, 0, stream_id), piece)
        stream.outbound_flow_control_window -= num_taken
        h2.outbound_flow_control_window -= num_taken
        self._num_out += num_taken
        self._allowance.earn(_OF_SENT + (num_taken >> 10))
        return num_taken

    def send_headers(self, stream_id: int, headers: Headers, ends: bool = False) -> None:
        self._h2.send_headers(stream_id, headers, end_stream=ends)
        self._gather()

    def forget(self, stream_id: int, reset: bool) -> None:
        call = self._calls.pop(stream_id, None)
        self._callers_own.pop(stream_id, None)
        if call is not None:
            self._blocked.discard(call)
        if reset:
            self._reset(stream_id, ErrorCodes.NO_ERROR)
        self._close_if_done()

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        with contextlib.suppress(StreamClosedError):  # the client was quicker
            self._h2.reset_stream(stream_id, code)
        self._gather()

    def _drop(self, call: Call) -> None:
        self._blocked.discard(call)
        call.cancel()
        self._close_if_done()

    # --- writing -------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Let calls put out what they have, and write it at once."""
        self._will_flush = True
        while self._is_open and self._due and not self._is_paused:
            due, self._due = self._due, []
            for call in due:
                call.is_due = False
                if not call.pump():
                    self._wait(call)
            self._write()
        self._write()
        self._will_flush = False

    def _flush_soon(self) -> None:
        if not self._will_flush:
            self._will_flush = True
            self._loop.call_soon(self._flush)

    def _wait(self, call: Call) -> None:
        """Pump the call again once a window, or only the transport's buffer, has room."""
        if self._h2.local_flow_control_window(call.stream_id) <= 0:
            self._blocked.add(call)
        elif not call.is_due:
            call.is_due = True
            self._due.append(call)

    def _gather(self) -> None:
        data = self._h2.data_to_send()
        if data:
            self._out.append(data)
            self._num_out += len(data)
            self._flush_soon()

    def _write(self) -> None:
        self._gather()
        transport = self._transport
        if transport is None or not self._is_open or not self._out:
            return
        transport.write(b"".join(self._out))
        self._out.clear()
        self._num_out = 0
        if transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            self.cut()

    # --- the end -------------------------------------------------------------------------------

    def _on_tick(self) -> None:
        """Silence is counted in ticks: a process that stood still has seen one of them."""
        self._num_silent = 0 if self._has_heard else self._num_silent + 1
        self._has_heard = False
        if self._num_silent >= 2:
            return self.cut()
        if self._num_silent:
            self._h2.ping(_KEEPALIVE)
        late_s = self._loop.time() - _REQUEST_WITHIN_S
        for call in list(self._calls.values()):
            call.expire(late_s)
        self._flush()
        self._tick = self._loop.call_later(self._policy.keepalive_s, self._on_tick)
        return None

    def go_away(self) -> None:
        """Finish what runs, and take nothing new."""
        if self._is_open and self._last_id is None:
            self._last_id = self._h2.highest_inbound_stream_id
            self._h2.close_connection()
            self._h2.ping(_GOING)
            self._write()

    @property
    def is_idle(self) -> bool:
        """Tell whether not even its oldest request is whole. Health's do not count: without a
        token, they could hold all places for ever."""
        oldest = next(iter(self._callers_own.values()), None)
        return oldest is None or not oldest.is_complete

    def leave(self, code: ErrorCodes = ErrorCodes.NO_ERROR, why: str = "") -> None:
        if self._is_open:
            self._h2.close_connection(code, why.encode())
            self._write()
            self._close()

    def _close_if_done(self) -> None:
        """Close, but not before the peer knows: what it sends until then is refused in order."""
        if self._knows and not self._calls:
            self._loop.call_soon(self._close)

    def shut(self) -> None:
        """Take leave of what still runs."""
        for call in list(self._calls.values()):
            call.end(_SHUT_DOWN)
        self._flush()
        self._close()

    def _close(self) -> None:
        """Close; what is written still goes out, while the peer reads it."""
        if self._is_open and self._transport is not None:
            self._forget_all()
            self._transport.close()
            self._loop.call_later(_CLOSES_WITHIN_S, self.cut)

    def cut(self) -> None:
        self._forget_all()
        if self._transport is not None:
            self._transport.abort()

    def _forget_all(self) -> None:
        self._is_open = False
        if self._tick is not None:
            self._tick.cancel()
        calls, self._calls = self._calls, {}
        self._callers_own.clear()
        for call in calls.values():
            self._drop(call)
        self._due.clear()
        self._blocked.clear()
        self._input.clear()


_SETTINGS = {
    SettingCodes.ENABLE_PUSH: 0,
    SettingCodes.MAX_CONCURRENT_STREAMS: _MAX_STREAMS,
    SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW_BYTES,
    SettingCodes.MAX_HEADER_LIST_SIZE: MAX_METADATA_BYTES,
}
# A call looks at its headers itself: for h2, one that is malformed costs the whole connection.
_CONFIG = H2Configuration(
    client_side=False,
    header_encoding=None,
    validate_inbound_headers=False,
    normalize_inbound_headers=False,
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
)

_HANDLERS: dict[type[Event], Callable[[Connection, Any], None]] = {
    RequestReceived: Connection._on_request,
    DataReceived: Connection._on_data,
    StreamEnded: Connection._on_end,
    StreamReset: Connection._on_reset,
    WindowUpdated: Connection._on_window,
    RemoteSettingsChanged: Connection._on_settings,
    PingAckReceived: Connection._on_pong,
    ConnectionTerminated: Connection._on_terminated,
}


class GrpcServer:
    """Own the connections of a port, and the tasks of their calls."""

    def __init__(self, policy: CallPolicy, listener: socket.socket, sharing: Sharing) -> None:
        self.port: int = listener.getsockname()[1]
        self.policy, self.sharing = policy, sharing
        self.methods: dict[bytes, Handler] = {}
        self.connections: set[Connection] = set()
        self.acceptor = Acceptor(listener, sharing, lambda: Connection(self))
        self.is_stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._emptied = asyncio.Event()

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Serve what the generated `add_..._to_server` register."""
        for name, handler in handlers.items():
            self.methods[f"/{service}/{name}".encode()] = handler

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Hear of the same methods again, for servers that look them up one by one."""

    def start(self, context: ssl.SSLContext | None) -> None:
        """Take connections. `context` None: in plain text."""
        self.acceptor.context = context
        self.acceptor.start()

    async def stop(self, grace_s: float) -> None:
        """Take nothing new; what runs has `grace_s` to end."""
        self.is_stopping = True
        await self.acceptor.stop()
        for end, within_s in (
            (Connection.go_away, grace_s),
            (Connection.shut, SHUT_WITHIN_S),
            (Connection.cut, SHUT_WITHIN_S),
        ):
            for connection in list(self.connections):
                end(connection)
            await self._wait_for_connections(within_s)
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _wait_for_connections(self, timeout_s: float) -> None:
        if self.connections:
            self._emptied.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._emptied.wait()

    def own(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def lose(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.sharing.lose(connection)
        if self.is_stopping and not self.connections:
            self._emptied.set()


_SHUT_DOWN = Status(StatusCode.UNAVAILABLE, "the server shuts down")
