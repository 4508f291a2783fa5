"""One worker as this router is connected to it: a link, a session on it, its KV events.

A worker gets requests only while it is connected: a decode worker while its session is open, a
prefill worker while it sends KV events. A lost connection is noticed at once, a dead or hung host
by its silence. The link is made again until `close`; `FleetLinks` decides whether
the worker belongs to the fleet.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from collections.abc import Callable
from typing import Protocol

import grpc

from baton.clock import NowS
from baton.config.router import RouterConfig
from baton.fleet import WorkerState
from baton.identity.identity import Identity
from baton.link.frames import LinkError, Method, link_name
from baton.link.router_end import Call, Caller, Link, LinkRefusedError
from baton.pacing import Backoff
from baton.v1 import worker_pb2
from baton.wire import ANY_ATTEMPT
from router.fleet.fleet import WorkerEntry
from router.fleet.session import RouterIdentity, Session
from router.index.prefix_index import PrefixIndex

_MAY_ANSWER = (ssl.SSLError, ConnectionResetError, TimeoutError)  # a connection's, yet
STABLE_S = 1.0
"""A connection counts only after it has lasted this long."""


class Contact:
    """How long to wait for a worker that does not answer: it may keep what nobody else has.

    Owns the time since which the worker seems out of reach. If its connections all end as soon as
    they begin, that is the start of the first one.
    """

    def __init__(self, patience_s: float, clock: NowS) -> None:
        self._patience_s, self._clock = patience_s, clock
        self._stable_s = min(STABLE_S, patience_s)
        self._in_doubt_since_s = clock()
        self._began_s = math.inf  # the connection that there is
        self._was_none_at_s = -math.inf  # when the last one ended, if it did too soon

    def begin(self) -> None:
        """A connection."""
        now = self._began_s = self._clock()
        if now - self._was_none_at_s >= self._patience_s:
            self._in_doubt_since_s = now

    def end(self) -> None:
        now = self._clock()
        if self._is_stable(now):
            self._in_doubt_since_s, self._was_none_at_s = now, -math.inf
        else:
            self._was_none_at_s = now
        self._began_s = math.inf

    @property
    def may_be_heard(self) -> bool:
        """The worker may answer now or in a moment."""
        now = self._clock()
        return self._is_stable(now) or now - self._in_doubt_since_s < self._patience_s

    def _is_stable(self, now: float) -> bool:
        return now - self._began_s >= self._stable_s


class KvFollower:
    """Own what the index knows of one worker: its snapshot, then every change, without a gap. The
    link's `Caller`."""

    def __init__(
        self, index: PrefixIndex, slot: int, on_first: Callable[[], None], again_s: float
    ) -> None:
        """`on_first` is called with a link's first message. `again_s`: when to ask again after the
        worker ended it."""
        self._index, self._slot, self._on_first, self._again_s = index, slot, on_first, again_s
        self._link: Link | None = None
        self._call: Call | None = None
        self._sequence: int | None = None
        self.is_exact = False
        """Whether the index says what the worker holds. False: events were missed, or none came."""

    def follow(self, link: Link) -> None:
        self._link, self._sequence = link, None
        self._call = link.call(Method.FOLLOW_KV, worker_pb2.SubscribeKvRequest(), self)

    def stop(self) -> None:
        """Take in nothing more."""
        self.is_exact, self._link = False, None
        if self._call is not None:
            self._call.cancel()

    def on_message(self, message: worker_pb2.SubscribeKvResponse) -> None:
        """Take in one message, or ask for a snapshot if some were missed before it."""
        is_first = self._sequence is None
        if message.snapshot:
            self._index.clear(self._slot)
        elif self._sequence is None or message.sequence != self._sequence + 1:
            self.is_exact = False
            if self._call is not None and self._link is not None:
                self._call.cancel()
                self.follow(self._link)
            return
        self._sequence = message.sequence
        stored = [(chain.parent_hash, chain.hashes) for chain in message.stored]
        self._index.follow(self._slot, message.removed, stored)
        self.is_exact = True
        if is_first:
            self._on_first()

    def on_end(self, error: LinkError | None) -> None:
        self.is_exact = False
        if (link := self._link) is not None and link.is_open:
            loop = asyncio.get_running_loop()
            loop.call_later(self._again_s, lambda: self._follow_again(link))

    def _follow_again(self, link: Link) -> None:
        if self._link is link and link.is_open:
            self.follow(link)


LOST_FOR = 2.0  # times `timeouts.attach_s`: what a worker kept is waited for no longer

log = logging.getLogger(__name__)


class Waiting(Protocol):
    """Who waits for a worker: an attempt."""

    @property
    def progress_s(self) -> float:
        """When its decode worker last sent a token of it."""

    def review_patience(self) -> None:
        """The worker's state has changed."""


class WorkerLink:
    """Own the connection to one worker incarnation."""

    def __init__(
        self,
        entry: WorkerEntry,
        config: RouterConfig,
        identity: RouterIdentity,
        index: PrefixIndex,
        on_connected: Callable[[WorkerEntry, bool], None],
        own: Identity,
    ) -> None:
        """`own`: who this process is to workers."""
        self.entry, self._own = entry, own
        self._config = config
        self._on_connected = on_connected
        facts = entry.facts
        self.session = Session(facts.worker_id, identity, config.links.max_unsent_bytes)
        self.waiting: set[Waiting] = set()
        self.first_token_s = -math.inf  # when it last sent one, as a prefill worker
        self._link: Link | None = None
        again_s = config.links.reconnect_max_s
        self.kv = KvFollower(index, entry.slot, self._on_first_kv, again_s)
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._last_why = ""
        self._contact = Contact(LOST_FOR * config.timeouts.attach_s, time.monotonic)
        self.tried = asyncio.Event()
        """Set when the first try to connect has ended, well or not."""

    def start(self) -> None:
        """Connect, again and again. If a fault ends that, it is started again, so the worker is not
        lost."""
        if self._is_stopped:
            return
        name = f"link:{self.entry.facts.worker_id}"
        task = self._task = asyncio.create_task(self._hold(), name=name)

        def ended(_: asyncio.Task[None]) -> None:
            if not self._is_stopped:
                error = None if task.cancelled() else task.exception()
                log.error("%s ended and is started again: %r", name, error, exc_info=error)
                again_s = self._config.links.reconnect_max_s
                asyncio.get_running_loop().call_later(again_s, self.start)

        task.add_done_callback(ended)

    def stop(self, why: str = "the link was closed") -> None:
        """Take in nothing more from the worker, since its slot may go to another."""
        self._is_stopped = True
        self.tried.set()
        self.kv.stop()
        self.session.end(why)
        if self._task is not None:
            self._task.cancel()
        if self._link is not None:
            self._link.close(why)

    async def close(self) -> None:
        self.stop()
        if self._task is not None:
            await asyncio.wait({self._task})

    @property
    def may_be_heard_again(self) -> bool:
        """Whether a silent decode worker may answer in a moment with all that it kept: the registry
        calls it healthy, and it has not been out of reach for long."""
        entry = self.entry
        if not entry.facts.can_decode or entry.state in (WorkerState.STARTING, WorkerState.SUSPECT):
            return False
        return self._contact.may_be_heard

    def prefill(self, request: worker_pb2.PrefillRequest, caller: Caller) -> Call | None:
        """Begin a prefill. None: the worker is not connected, and the caller has been told."""
        if self._link is not None:
            return self._link.call(Method.PREFILL, request, caller)
        caller.on_end(LinkError(grpc.StatusCode.UNAVAILABLE, "it is not connected"))
        return None

    async def attach(
        self, request: worker_pb2.AttachRequest, timeout_s: float
    ) -> worker_pb2.AttachResponse:
        """Take over a request: its later tokens come on the session that is open now. Without a
        `seed` or an `attempt`, whichever it runs with.

        Raises LinkError: NOT_FOUND when the worker does not know the request, ALREADY_EXISTS when
        the id is another request's, which stays where it is.
        """
        if self._link is None:
            raise LinkError(grpc.StatusCode.UNAVAILABLE, "there is no connection")
        request.router_id = self.session.session_id
        response: worker_pb2.AttachResponse
        response = await self._link.ask(Method.ATTACH, request, timeout_s)
        return response

    async def cancel(self, wire_id: str, timeout_s: float) -> bool:
        """End what runs here under the id, whichever router follows it. False: nothing does, or the
        worker does not say."""
        if self._link is None:
            return False
        request = worker_pb2.Cancel(request_id=wire_id, attempt=ANY_ATTEMPT)
        try:
            response = await self._link.ask(Method.CANCEL, request, timeout_s)
        except LinkError as error:
            log.info("cancel at %s: %s", self.entry.facts.worker_id, error)
            return False
        return bool(response.found)

    def review_waiting(self) -> None:
        """Let all attempts that wait for this worker compute their limits again."""
        for waiting in list(self.waiting):
            waiting.review_patience()

    # --- keeping it up -------------------------------------------------------------------------

    async def _hold(self) -> None:
        """Keep the link up. Attempts of a lost one wait for the next, so it is tried at once."""
        links, loop = self._config.links, asyncio.get_running_loop()
        backoff = Backoff(links.reconnect_min_s, links.reconnect_max_s)
        while True:
            began_s = loop.time()
            try:
                await self._connected()
            except OSError as error:
                self._tell(error)
                if not isinstance(error, _MAY_ANSWER):  # nothing answers at its address
                    self.session.refuse_waiting()
            self.tried.set()
            if loop.time() - began_s > STABLE_S:
                backoff.reset()
            else:
                await asyncio.sleep(backoff.next_s())

    def _tell(self, error: OSError) -> None:
        worker_id, why = self.entry.facts.worker_id, str(error)
        if not isinstance(error, (*_MAY_ANSWER, LinkRefusedError)):
            log.debug("%s: %s", worker_id, why)
        elif why != self._last_why:
            self._last_why = why
            log.warning("%s does not answer: %s", worker_id, why)

    async def _connected(self) -> None:
        """Connect, and return when the connection is lost. Raises OSError, TimeoutError."""
        config = self._config
        link = self._link = await Link.connect(
            self.entry.facts.address,
            self._own,
            keepalive_s=config.links.keepalive_s,
            timeout_s=config.links.connect_timeout_s,
            worker=link_name(self.entry.facts.ref),
        )
        try:
            if self.entry.facts.can_decode:
                self.session.open(link)
                self._set_connected(True)
            self.kv.follow(link)
            why = await link.lost
            log.info("link to %s: %s", self.entry.facts.worker_id, why)
        finally:
            link.close("it was given up")
            self._link = None
            self.kv.stop()
            self._set_connected(False)

    def _on_first_kv(self) -> None:
        if not self.entry.facts.can_decode:
            self._set_connected(True)

    def _set_connected(self, connected: bool) -> None:
        self.tried.set()
        if connected != self.entry.connected:
            if connected:
                self._contact.begin()
            else:
                self._contact.end()
            log.info(
                "%s %s", self.entry.facts.worker_id, "connected" if connected else "disconnected"
            )
            self._on_connected(self.entry, connected)
