"""The one session between this router and one decode worker.

1. It is opened on each new link to the worker. 2. Reservations and cancels go out in order; what
comes in is handed to the attempt it names. 3. When the link is lost every attempt is informed once,
and forgotten here. It may wait for the next session with the same worker (`wait_open`) and attach
there. Cancels that were not sent, or may have been lost, go first in the next session: an abandoned
attempt may still run there.

Every session has an id of its own. The worker may learn of the lost session after the next one, and
must not attach a request to the lost one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from baton.link.frames import LinkError, Method
from baton.link.router_end import Call, Link
from baton.v1 import worker_pb2
from baton.wire import ANY_ATTEMPT

MAX_KEPT_CANCELS = 10_000
SURELY_RECEIVED_S = 10.0  # a session that lived this long after a cancel has carried it


@dataclass(frozen=True)
class RouterIdentity:
    router_id: str
    incarnation: int


class SessionLostError(Exception):
    """There is no session with the worker, or it broke."""


Report = worker_pb2.Reserved | worker_pb2.Rejected | worker_pb2.HandoffAdmitted | worker_pb2.Moved
"""What a decode worker says of an attempt, but its tokens."""


class AttemptHandler(Protocol):
    """Callbacks of a session for one attempt. All run on the event loop, and none may block."""

    @property
    def wire_id(self) -> str: ...
    @property
    def number(self) -> int | None:
        """Messages of other attempts are dropped; None while the number is not known yet."""

    def on_tokens(self, tokens: worker_pb2.RequestTokens) -> None: ...
    def on_report(self, report: Report) -> None: ...
    def on_session_lost(self, message: str) -> None: ...


class Session:
    """Own the session and the attempts that listen on it. The link's `Caller`."""

    def __init__(self, worker_id: str, identity: RouterIdentity, max_unsent_bytes: int) -> None:
        """`max_unsent_bytes`: a worker that leaves more than this unread is lost."""
        self._worker_id = worker_id
        self._identity = identity
        self._max_unsent_bytes = max_unsent_bytes
        self._handlers: dict[str, AttemptHandler] = {}
        self._link: Link | None = None
        self._call: Call | None = None
        self._waiting: set[asyncio.Future[None]] = set()  # for the next session
        self._num_sessions = 0
        self._is_over = False
        self.end_request: Callable[[str], bool] = lambda wire_id: False
        """Ends a request that its client aborts at another router. False: it is not here."""
        self._cancels: OrderedDict[tuple[str, int], float | None] = OrderedDict()
        """Request and attempt -> when it was sent, None: not yet. Oldest first."""

    @property
    def is_open(self) -> bool:
        return self._call is not None

    @property
    def session_id(self) -> str:
        """The session's id at the worker; never used before."""
        return f"{self._identity.router_id}/{self._num_sessions}"

    async def wait_open(self) -> None:
        """Wait for a session. Raises SessionLostError when the worker is given up, or is dead:
        nothing answers at its address."""
        if self._call is not None:
            return
        if self._is_over:
            raise SessionLostError(f"{self._worker_id} was given up")
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)

    def refuse_waiting(self) -> None:
        """Disappoint those that wait for a session: the worker cannot be reached now."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(SessionLostError(f"{self._worker_id} cannot be reached"))

    @property
    def num_attempts(self) -> int:
        return len(self._handlers)

    # --- what attempts call --------------------------------------------------------------------

    def listen(self, handler: AttemptHandler) -> None:
        """Hand messages about the handler's request to it. Raises SessionLostError."""
        if self._call is None:
            raise SessionLostError(f"no session with {self._worker_id}")
        self._handlers[handler.wire_id] = handler

    def leave(self, handler: AttemptHandler) -> None:
        if self._handlers.get(handler.wire_id) is handler:
            del self._handlers[handler.wire_id]

    def reserve(self, reserve: worker_pb2.Reserve) -> None:
        """Ask the worker for room. Raises SessionLostError."""
        self._send(worker_pb2.SessionRequest(reserve=reserve))

    def cancel(self, wire_id: str, attempt: int) -> None:
        """Abort an attempt, now or when the worker is connected again."""
        now = asyncio.get_running_loop().time()
        sent_s: float | None = None
        cancel = worker_pb2.Cancel(request_id=wire_id, attempt=attempt)
        try:
            self._send(worker_pb2.SessionRequest(cancel=cancel))
            sent_s = now
        except SessionLostError:
            pass  # it is kept
        self._cancels[(wire_id, attempt)] = sent_s
        self._forget_received(now)

    def cancel_every_attempt(self, wire_id: str) -> None:
        """Abort what runs under the id. The cancel is not kept when the session is lost: nobody
        follows the request any more, and a later one may have the id."""
        cancel = worker_pb2.Cancel(request_id=wire_id, attempt=ANY_ATTEMPT)
        with contextlib.suppress(SessionLostError):
            self._send(worker_pb2.SessionRequest(cancel=cancel))

    def _forget_received(self, now: float) -> None:
        while self._cancels:
            oldest, sent_s = next(iter(self._cancels.items()))
            received = sent_s is not None and now - sent_s > SURELY_RECEIVED_S
            if not received and len(self._cancels) <= MAX_KEPT_CANCELS:
                return
            del self._cancels[oldest]

    def _send(self, message: worker_pb2.SessionRequest) -> None:
        """Raises SessionLostError."""
        if self._link is None or self._call is None:
            raise SessionLostError(f"no session with {self._worker_id}")
        if self._link.num_unsent > self._max_unsent_bytes:
            self._link.close("it takes no messages")
            raise SessionLostError(f"{self._worker_id} takes no messages")
        self._call.send(message)

    # --- the link ------------------------------------------------------------------------------

    def open(self, link: Link) -> None:
        """Begin the next session, on this link."""
        now = asyncio.get_running_loop().time()
        self._forget_received(now)
        self._num_sessions += 1
        opening = worker_pb2.OpenSession(
            router_id=self.session_id, incarnation=self._identity.incarnation
        )
        self._link = link
        self._call = link.call(Method.SESSION, worker_pb2.SessionRequest(open=opening), self)
        for wire_id, attempt in self._cancels:
            cancel = worker_pb2.Cancel(request_id=wire_id, attempt=attempt)
            self._call.send(worker_pb2.SessionRequest(cancel=cancel))
            self._cancels[(wire_id, attempt)] = now
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    def on_end(self, error: LinkError | None) -> None:
        """Close the link as well: a session lives as long as its link."""
        why = "the worker closed its session" if error is None else f"session lost: {error}"
        link = self._link
        self._lose(f"{self._worker_id}: {why}")
        if link is not None:
            link.close(why)

    def end(self, message: str) -> None:
        """The worker is given up: attempts on it are informed at once."""
        self._is_over = True
        self.refuse_waiting()
        if self._call is not None:
            self._call.cancel()
            self._lose(message)

    def _lose(self, message: str) -> None:
        self._link = self._call = None
        handlers, self._handlers = self._handlers, {}
        for handler in handlers.values():
            handler.on_session_lost(message)

    def on_message(self, response: worker_pb2.SessionResponse) -> None:
        self._report((*response.reserved, *response.admitted))
        for tokens in response.tokens:
            follows = self._handler(tokens.request_id, tokens.attempt)
            if follows is not None:
                follows.on_tokens(tokens)
        self._report((*response.rejected, *response.moved))
        for wire_id in response.end:
            ended = worker_pb2.Ended(request_id=wire_id, found=self.end_request(wire_id))
            with contextlib.suppress(SessionLostError):
                self._send(worker_pb2.SessionRequest(ended=ended))

    def _report(self, reports: Iterable[Report]) -> None:
        """Hand over each report on a current attempt."""
        for report in reports:
            if handler := self._handler(report.request_id, report.attempt):
                handler.on_report(report)

    def _handler(self, wire_id: str, attempt: int) -> AttemptHandler | None:
        handler = self._handlers.get(wire_id)
        is_current = handler is not None and handler.number in (None, attempt)
        return handler if is_current else None
