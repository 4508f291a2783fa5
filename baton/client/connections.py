"""A client's channels to its routers.

An address may stand for several routers (a Kubernetes Service), and a channel stays with the one
that it has reached. When that router shuts down, the address's next call uses a new connection. The
old one is closed after its last call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from baton.v1 import control_pb2_grpc, router_pb2_grpc


class Connection:
    """One channel, of grpc or grpc.aio, written by `Connections` alone."""

    def __init__(self, address_index: int, channel: Any) -> None:
        self.address_index, self.channel = address_index, channel
        # The generated stub serves both kinds of channel; its types speak of asyncio alone.
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        stub.WatchFleet = control_pb2_grpc.FleetServiceStub(channel).WatchFleet
        self.stub = stub
        self.num_calls = 0
        self.is_over = False


class Connections:
    """Own which channel leads to each address. Threads may share one."""

    def __init__(self, addresses: Sequence[str], connect: Callable[[str], Any]) -> None:
        self._addresses, self._connect = addresses, connect
        self._lock = threading.Lock()
        self._current = [
            Connection(index, connect(address)) for index, address in enumerate(addresses)
        ]
        self._left: list[Connection] = []  # calls run on them still
        self._is_closed = False

    def current(self, address_index: int) -> Connection:
        return self._current[address_index]

    def in_turn(self, first: Connection, with_left: bool) -> list[Connection]:
        """`first`, then the connections to the addresses after it. `with_left`: then also old
        connections whose calls still run."""
        with self._lock:
            at = first.address_index
            left = self._left if with_left else []
            turn = [first, *self._current[at:], *self._current[:at], *left]
        return list(dict.fromkeys(turn))

    def begin(self, connection: Connection) -> Connection:
        """Note a call over this connection, or over its successor if it has ended."""
        with self._lock:
            if connection.is_over:
                connection = self._current[connection.address_index]
            connection.num_calls += 1
            return connection

    def end(self, connection: Connection) -> Any | None:
        """Note a call's end. Returns the channel if no call needs it any more."""
        with self._lock:
            connection.num_calls -= 1
            if connection.num_calls or connection not in self._left:
                return None
            self._left.remove(connection)
            connection.is_over = True
            return connection.channel

    def leave(self, connection: Connection) -> None:
        """Note that the router there shuts down. Calls that still run keep the connection."""
        with self._lock:
            at = connection.address_index
            if self._current[at] is connection and not self._is_closed:
                self._left.append(connection)
                self._current[at] = Connection(at, self._connect(self._addresses[at]))

    def close(self) -> list[Any]:
        """Close for good: return all channels to close, and open no further one."""
        with self._lock:
            self._is_closed = True
            return [connection.channel for connection in (*self._current, *self._left)]
