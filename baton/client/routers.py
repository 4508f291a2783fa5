"""The decisions of both clients: calls, connections, the order of routers, failed tries.

`Client` and `AsyncClient` open channels and wait. Every decision is made here and, for a stream, in
`request_stream`. The one client is not built upon the other: grpc.aio in a second event loop of a
process disturbs the first (grpc issue 25364).

An address may stand for several routers (a Kubernetes Service), and a channel stays with the one
that it has reached. When that router shuts down, the address's next call uses a new connection. The
old one is closed after its last call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import grpc.aio

from baton import status
from baton.client.request_stream import RequestStream
from baton.errors import BatonError, NotFoundError, UnavailableError
from baton.v1 import control_pb2, router_pb2, router_pb2_grpc

T = TypeVar("T")
C = TypeVar("C")

REFUSED_BY_GRPC = (ValueError, grpc.aio.UsageError)
"""gRPC raises it for a call on a closed channel, among others."""
_ABORT_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Call(Generic[T]):
    """A short call of RouterService: its message, and what the caller gets of the answer."""

    method: str
    message: Any
    read: Callable[[Any], T]
    takes_first: bool = False
    """The method streams, and its first message is the answer."""
    only_where_known: bool = False
    """Only one router may know the request, so the next is asked on NOT_FOUND."""


def abort(request_id: str, tenant: str) -> Call[None]:
    message = router_pb2.AbortRequest(request_id=request_id, tenant=tenant)
    return Call("Abort", message, lambda answer: None, only_where_known=True)


def models() -> Call[list[router_pb2.Model]]:
    return Call("ListModels", router_pb2.ListModelsRequest(), lambda answer: list(answer.models))


def tokenize(text: str, tenant: str) -> Call[list[int]]:
    message = router_pb2.TokenizeRequest(text=text, tenant=tenant)
    return Call("Tokenize", message, lambda answer: list(answer.ids))


def explain(request: router_pb2.GenerateRequest) -> Call[router_pb2.ExplainRouteResponse]:
    message = router_pb2.ExplainRouteRequest(request=request)
    return Call("ExplainRoute", message, lambda answer: answer)


def fleet() -> Call[control_pb2.WatchFleetResponse]:
    message = router_pb2.RouterServiceWatchFleetRequest()
    return Call("WatchFleet", message, lambda answer: answer.fleet, takes_first=True)


class Connection(Generic[C]):
    """One channel, written by `Connections` alone."""

    def __init__(self, address_index: int, channel: C) -> None:
        self.address_index, self.channel = address_index, channel
        # The generated stub serves both kinds of channel; its types speak of asyncio alone.
        self.stub: Any = router_pb2_grpc.RouterServiceStub(cast(grpc.aio.Channel, channel))
        self.num_calls = 0
        self.is_over = False


class Connections(Generic[C]):
    """Own which channel leads to each address. Threads may share one."""

    def __init__(self, addresses: Sequence[str], connect: Callable[[str], C]) -> None:
        self._addresses, self._connect = addresses, connect
        self._lock = threading.Lock()
        self._current = [
            Connection(index, connect(address)) for index, address in enumerate(addresses)
        ]
        self._left: list[Connection[C]] = []  # calls run on them still
        self._is_closed = False

    def current(self, address_index: int) -> Connection[C]:
        return self._current[address_index]

    def in_turn(self, first: Connection[C], with_left: bool) -> list[Connection[C]]:
        """`first`, then the connections to the addresses after it. `with_left`: then also old
        connections whose calls still run."""
        with self._lock:
            at = first.address_index
            left = self._left if with_left else []
            turn = [first, *self._current[at:], *self._current[:at], *left]
        return list(dict.fromkeys(turn))

    def begin(self, connection: Connection[C]) -> Connection[C]:
        """Note a call over this connection or its successor."""
        with self._lock:
            if connection.is_over:
                connection = self._current[connection.address_index]
            connection.num_calls += 1
            return connection

    def end(self, connection: Connection[C]) -> C | None:
        """Note a call's end. Returns the channel if no call needs it any more."""
        with self._lock:
            connection.num_calls -= 1
            if connection.num_calls or connection not in self._left:
                return None
            self._left.remove(connection)
            connection.is_over = True
            return connection.channel

    def leave(self, connection: Connection[C]) -> None:
        """Note that the router there shuts down. Calls that still run keep the connection."""
        with self._lock:
            at = connection.address_index
            if self._current[at] is connection and not self._is_closed:
                self._left.append(connection)
                self._current[at] = Connection(at, self._connect(self._addresses[at]))

    def close(self) -> list[C]:
        """Returns all channels to close. No further one is opened."""
        with self._lock:
            self._is_closed = True
            return [connection.channel for connection in (*self._current, *self._left)]


class Routers(Generic[C]):
    """Own what a client knows of its routers: their addresses, its connections to them, and which
    is asked first."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        reconnect_within_s: float,
        call_timeout_s: float,
        connect: Callable[[str], C],
    ) -> None:
        listed = addresses.split(",") if isinstance(addresses, str) else addresses
        self.addresses = [address.strip() for address in listed if address.strip()]
        if not self.addresses:
            raise ValueError("at least one router address is needed")
        self.connections = Connections(self.addresses, connect)
        self.preferred = 0
        self._reconnect_within_s = reconnect_within_s
        self._call_timeout_s = call_timeout_s
        self._is_closed = False

    def close(self) -> list[C]:
        """The channels to close."""
        self._is_closed = True
        return self.connections.close()

    def check_open(self) -> None:
        """Raises UnavailableError once the client is closed."""
        if self._is_closed:
            raise UnavailableError("the client is closed")

    def stream(self, request: router_pb2.GenerateRequest) -> RequestStream:
        return RequestStream(
            request,
            self.addresses,
            first_address=self.preferred,
            reconnect_within_s=self._reconnect_within_s,
        )

    def lost(
        self, stream: RequestStream, connection: Connection[C], failure: status.RpcFailure | None
    ) -> float:
        """Handle a stream's failure. No other request begins at a router that shuts down."""
        pause_s = stream.lost(failure)
        if stream.was_sent_away:
            self.preferred = stream.address_index
            self.connections.leave(connection)
        return pause_s

    def answered(self, connection: Connection[C]) -> None:
        """The stream ended well: its router is asked first from now on, unless it shuts down."""
        if self.connections.current(connection.address_index) is connection:
            self.preferred = connection.address_index

    def tries(self, call: Call[T]) -> Tries[T, C]:
        first = self.connections.current(self.preferred)
        return self._tries(call, self._call_timeout_s, first)

    def abandon(self, stream: RequestStream, connection: Connection[C]) -> Tries[None, C] | None:
        """The abort of a request whose caller has left, first at the router that it was last sent
        to. None if there is nothing to abort."""
        if stream.is_finished or self._is_closed:
            return None
        return self._tries(abort(stream.request_id, stream.tenant), _ABORT_TIMEOUT_S, connection)

    def _tries(self, call: Call[T], timeout_s: float, first: Connection[C]) -> Tries[T, C]:
        self.check_open()
        return Tries(self, call, timeout_s, self.connections.in_turn(first, call.only_where_known))


class Tries(Generic[T, C]):
    """One short call at one router after the other until one answers."""

    def __init__(
        self,
        routers: Routers[C],
        call: Call[T],
        timeout_s: float,
        connections: Sequence[Connection[C]],
    ) -> None:
        """`timeout_s`: longest wait for each router; `connections`: in the order they are used."""
        self._routers, self._connections = routers, connections
        self._num_failed = 0
        self.call = call
        self.timeout_s = timeout_s

    @property
    def connection(self) -> Connection[C]:
        """The connection to ask now."""
        return self._connections[self._num_failed]

    def answered(self, answer: Any) -> T:
        """What the caller gets of an answer. Its router is asked first from now on."""
        if answer is None:
            address = self._routers.addresses[self.connection.address_index]
            raise UnavailableError(f"the router at {address} ended its answer before it began")
        self._routers.answered(self.connection)
        return self.call.read(answer)

    def failed(self, error: grpc.RpcError) -> None:
        """Go on to the next router; raises the call's error when that is of no use."""
        failure = cast(status.RpcFailure, error)
        problem = self._problem(failure)
        self._num_failed += 1
        goes_on = (
            isinstance(problem, UnavailableError)
            or status.is_connection_lost(failure)
            or (self.call.only_where_known and isinstance(problem, NotFoundError))
        )
        if not goes_on or self._num_failed == len(self._connections):
            raise problem from error
        self._routers.check_open()

    def _problem(self, failure: status.RpcFailure) -> BatonError:
        listed = ", ".join(self._routers.addresses)
        if status.is_out_of_time(failure):
            return UnavailableError(f"no answer from {listed} within {self.timeout_s:g} s")
        return status.from_rpc_error(failure, listed)
