"""What both clients do, whatever waits for the answer: calls, the order of routers, failed tries.

`Client` and `AsyncClient` hold connections and wait; every decision is made here and, for a
stream, in `request_stream`. The one is not built upon the other: grpc.aio in a second event loop
of a process disturbs the first (grpc issue 25364).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import grpc

from baton import status
from baton.errors import BatonError, NotFoundError, UnavailableError
from baton.request_stream import RequestStream
from baton.v1 import control_pb2, router_pb2

T = TypeVar("T")

_ABORT_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Call(Generic[T]):
    """A short call of RouterService: its message, and what its answer is to the caller."""

    method: str
    message: Any
    read: Callable[[Any], T]
    takes_first: bool = False
    """The method streams, and its first message is the answer."""
    only_where_known: bool = False
    """One router alone may know what is meant: the next is asked when one does not."""


def abort(request_id: str, tenant: str) -> Call[None]:
    message = router_pb2.AbortRequest(request_id=request_id, tenant=tenant)
    return Call("Abort", message, lambda answer: None, only_where_known=True)


def models() -> Call[list[router_pb2.Model]]:
    return Call("ListModels", router_pb2.ListModelsRequest(), lambda answer: list(answer.models))


def tokenize(text: str, tenant: str) -> Call[list[int]]:
    message = router_pb2.TokenizeRequest(text=text, tenant=tenant)
    return Call("Tokenize", message, lambda answer: list(answer.ids))


def explain(request: router_pb2.GenerateRequest) -> Call[list[router_pb2.RouteCandidate]]:
    message = router_pb2.ExplainRouteRequest(request=request)
    return Call("ExplainRoute", message, lambda answer: list(answer.candidates))


def fleet() -> Call[control_pb2.WatchFleetResponse]:
    message = router_pb2.RouterServiceWatchFleetRequest()
    return Call("WatchFleet", message, lambda answer: answer.fleet, takes_first=True)


class Routers:
    """Own what a client knows of its routers: their addresses, and which is asked first."""

    def __init__(
        self, addresses: str | Sequence[str], reconnect_within_s: float, call_timeout_s: float
    ) -> None:
        listed = addresses.split(",") if isinstance(addresses, str) else addresses
        self.addresses = [address.strip() for address in listed if address.strip()]
        if not self.addresses:
            raise ValueError("at least one router address is needed")
        self.preferred = 0
        self._reconnect_within_s = reconnect_within_s
        self._call_timeout_s = call_timeout_s
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True

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

    def tries(self, call: Call[T]) -> Tries[T]:
        return Tries(self, call, self._call_timeout_s, self.preferred)

    def abandon(self, stream: RequestStream) -> Tries[None] | None:
        """The abort of a request whose caller has left; None where there is nothing to abort."""
        if stream.is_finished or self._is_closed:
            return None
        call = abort(stream.request_id, stream.tenant)
        return Tries(self, call, _ABORT_TIMEOUT_S, stream.address_index)


class Tries(Generic[T]):
    """One short call at one router after the other until one answers."""

    def __init__(self, routers: Routers, call: Call[T], timeout_s: float, first_index: int) -> None:
        """`timeout_s`: longest wait for each router; `first_index`: of the one asked first."""
        routers.check_open()
        self._routers = routers
        self._first_index = first_index
        self._num_failed = 0
        self.call = call
        self.timeout_s = timeout_s

    @property
    def address_index(self) -> int:
        """Of the router to ask now."""
        return (self._first_index + self._num_failed) % len(self._routers.addresses)

    def answered(self, answer: Any) -> T:
        """The caller's part of an answer; its router is asked first from now on."""
        if answer is None:
            address = self._routers.addresses[self.address_index]
            raise UnavailableError(f"the router at {address} ended its answer before it began")
        self._routers.preferred = self.address_index
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
        if not goes_on or self._num_failed == len(self._routers.addresses):
            raise problem from error
        self._routers.check_open()

    def _problem(self, failure: status.RpcFailure) -> BatonError:
        listed = ", ".join(self._routers.addresses)
        if status.is_out_of_time(failure):
            return UnavailableError(f"no answer from {listed} within {self.timeout_s:g} s")
        return status.from_rpc_error(failure, listed)
