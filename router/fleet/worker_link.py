"""One worker as this router is connected to it: a channel, a session, its KV events.

A worker gets requests only while it is connected: a decode worker while its session is open, a
prefill worker while it sends KV events. A lost connection is noticed at once, a dead or hung host
by unanswered keepalive pings. The link is made again until `close`; `FleetLinks` decides whether
the worker belongs to the fleet.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from baton.clock import NowS
from baton.config.router import RouterConfig
from baton.grpc_options import DIRECT, sends_pings
from baton.v1 import worker_pb2, worker_pb2_grpc
from router.fleet.fleet import WorkerEntry, WorkerState
from router.fleet.session import RouterIdentity, Session
from router.placement.prefix_index import PrefixIndex

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


class Backoff:
    """How long to wait before a peer is asked again: doubles, with jitter so that routers do not
    march in step."""

    def __init__(self, config: RouterConfig) -> None:
        self._first_s, self._longest_s = config.reconnect_min_s, config.reconnect_max_s
        self._next_s = self._first_s

    def reset(self) -> None:
        self._next_s = self._first_s

    def next_s(self) -> float:
        wait_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(self._longest_s, self._next_s * 2)
        return wait_s


class IndexState(enum.Enum):
    """EXACT: the index says what the worker holds. DEGRADED: events were missed, or none came."""

    EXACT = "exact"
    DEGRADED = "degraded"


class KvFollower:
    """Own what the index knows of one worker: its snapshot, then every change, without a gap."""

    def __init__(self, index: PrefixIndex, slot: int, incarnation: int) -> None:
        self._index, self._slot, self._incarnation = index, slot, incarnation
        self._sequence: int | None = None
        self.state = IndexState.DEGRADED
        self.num_gaps = 0

    async def run(
        self, stub: worker_pb2_grpc.WorkerServiceStub, on_connected: Callable[[], None]
    ) -> bool:
        """Follow one subscription; raises grpc.aio.AioRpcError when it breaks.

        `on_connected` is called with the first message. False when the worker ended it, True when
        events were missed and it is to be made again at once.
        """
        self._sequence = None
        call = stub.SubscribeKv(worker_pb2.SubscribeKvRequest())
        try:
            async for message in call:
                first = self._sequence is None
                if not self.apply(message):
                    return message.incarnation == self._incarnation
                if first:
                    on_connected()
            return False
        finally:
            self.state = IndexState.DEGRADED
            call.cancel()

    def apply(self, message: worker_pb2.SubscribeKvResponse) -> bool:
        """Take in one message; False when it does not follow the one before: subscribe again."""
        if message.incarnation != self._incarnation:
            log.warning("slot %d answers as another incarnation", self._slot)
            return False
        if message.snapshot:
            self._index.clear(self._slot)
        elif self._sequence is None or message.sequence != self._sequence + 1:
            self.num_gaps += 1
            self.state = IndexState.DEGRADED
            return False
        self._sequence = message.sequence
        stored = [(chain.parent_hash, chain.hashes) for chain in message.stored]
        self._index.follow(self._slot, message.removed, stored)
        self.state = IndexState.EXACT
        return True


ATTACH_AGAIN_S = 0.005  # while the session's first message is on its way to the worker
LOST_FOR = 2.0  # times `attach_timeout_s`: what a worker kept is waited for no longer

log = logging.getLogger(__name__)

PrefillCall = grpc.aio.UnaryStreamCall[worker_pb2.PrefillRequest, worker_pb2.PrefillResponse]


def channel_to(address: str, config: RouterConfig) -> grpc.aio.Channel:
    """Connect to a worker or the registry.

    A peer that answers no ping for twice `keepalive_s` is lost, as is one whose host vanished
    silently. A lost peer is tried again soon and often. Message sizes are the router's.
    """
    options = (
        *sends_pings(config.keepalive_s),
        ("grpc.initial_reconnect_backoff_ms", int(config.reconnect_min_s * 1e3)),
        ("grpc.min_reconnect_backoff_ms", int(config.reconnect_min_s * 1e3)),
        ("grpc.max_reconnect_backoff_ms", int(config.reconnect_max_s * 1e3)),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        *DIRECT,
    )
    return grpc.aio.insecure_channel(address, options=options)


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
    ) -> None:
        self.entry = entry
        self._config = config
        self._on_connected = on_connected
        facts = entry.facts
        self._channel = channel_to(facts.address, config)
        self._decode = worker_pb2_grpc.DecodeServiceStub(self._channel)
        self._prefill = worker_pb2_grpc.PrefillServiceStub(self._channel)
        self._worker = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self.session = Session(facts.worker_id, identity, config.max_session_backlog)
        self.waiting: set[Waiting] = set()
        self.first_token_s = -math.inf  # when it last sent one, as a prefill worker
        self._kv = KvFollower(index, entry.slot, facts.incarnation)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_stopped = False
        self._contact = Contact(LOST_FOR * config.attach_timeout_s, time.monotonic)
        self.tried = asyncio.Event()
        """Set when the first try to connect has ended, well or not."""

    @property
    def index_state(self) -> IndexState:
        return self._kv.state

    @property
    def num_gaps(self) -> int:
        return self._kv.num_gaps

    def start(self) -> None:
        name = self.entry.facts.worker_id
        self._begin(f"kv:{name}", self._follow_kv)
        if self.entry.facts.can_decode:
            self._begin(f"session:{name}", self._hold_session)

    def _begin(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Start a task that ends only with the link. If a fault ends it, it is started again, so
        the worker is not lost."""
        if self._is_stopped:
            return
        task = self._tasks[name] = asyncio.create_task(work(), name=name)

        def ended(_: asyncio.Task[None]) -> None:
            if not self._is_stopped:
                error = None if task.cancelled() else task.exception()
                log.error("%s ended and is started again: %r", name, error, exc_info=error)
                again_s = self._config.reconnect_max_s
                asyncio.get_running_loop().call_later(again_s, self._begin, name, work)

        task.add_done_callback(ended)

    def stop(self) -> None:
        """Take in nothing more from the worker, since its slot may go to another."""
        self._is_stopped = True
        self.tried.set()
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        self.stop()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._channel.close()

    @property
    def has_left(self) -> bool:
        """The fleet: it can be asked for nothing any more."""
        return self._is_stopped

    @property
    def may_be_heard_again(self) -> bool:
        """Whether a silent decode worker may answer in a moment with all that it kept: the registry
        calls it healthy, and it has not been out of reach for long."""
        entry = self.entry
        if not entry.facts.can_decode or entry.state in (WorkerState.STARTING, WorkerState.SUSPECT):
            return False
        return self._contact.may_be_heard

    def prefill(self, request: worker_pb2.PrefillRequest, timeout_s: float) -> PrefillCall:
        return self._prefill.Prefill(request, timeout=timeout_s)

    async def attach(
        self,
        wire_id: str,
        tenant: str,
        body_digest: bytes,
        seed: int | None,
        timeout_s: float,
        attempt: int | None = None,
    ) -> worker_pb2.AttachResponse:
        """Take over a request: its later tokens come on the session that is open now. Without a
        `seed` or an `attempt`, whichever it runs with.

        Raises grpc.aio.AioRpcError: NOT_FOUND when the worker does not know the request,
        ALREADY_EXISTS when the id is another request's, which stays where it is.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            request = worker_pb2.AttachRequest(
                router_id=self.session.session_id,
                request_id=wire_id,
                tenant=tenant,
                body_digest=body_digest,
                seed=seed,
                attempt=attempt,
            )
            left_s = max(0.001, deadline_s - loop.time())
            try:
                return await self._decode.Attach(request, timeout=left_s)
            except grpc.aio.AioRpcError as error:
                early = error.code() is grpc.StatusCode.FAILED_PRECONDITION
                if not early or loop.time() + ATTACH_AGAIN_S >= deadline_s:
                    raise
            await asyncio.sleep(ATTACH_AGAIN_S)

    def review_waiting(self) -> None:
        """Let all attempts that wait for this worker compute their limits again."""
        for waiting in list(self.waiting):
            waiting.review_patience()

    # --- keeping it up -------------------------------------------------------------------------

    async def _follow_kv(self) -> None:
        counts = not self.entry.facts.can_decode
        backoff = Backoff(self._config)

        def connected() -> None:
            backoff.reset()
            if counts:
                self._set_connected(True)

        while True:
            missed = False
            try:
                missed = await self._kv.run(self._worker, connected)
            except grpc.aio.AioRpcError as error:
                log.debug("KV events of %s: %s", self.entry.facts.worker_id, error.code().name)
            if counts and not missed:
                self._set_connected(False)
            await asyncio.sleep(backoff.next_s())

    async def _hold_session(self) -> None:
        """Attempts of a lost session wait for the next one, so the first try comes at once."""
        backoff = Backoff(self._config)
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(self._config.connect_timeout_s):
                    await self._wait_ready()
            except TimeoutError:
                self.tried.set()
                continue
            opened_at = loop.time()
            try:
                await self.session.run(self._decode, lambda: self._set_connected(True))
            except grpc.aio.AioRpcError as error:
                log.info("session with %s: %s", self.entry.facts.worker_id, error.code().name)
            finally:
                self._set_connected(False)
            if loop.time() - opened_at > STABLE_S:
                backoff.reset()
            else:
                await asyncio.sleep(backoff.next_s())

    async def _wait_ready(self) -> None:
        """Wait for the channel to connect. A refused connection is reported to those that wait for
        it."""
        while (state := self._channel.get_state(True)) is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                self.session.refuse_waiting()
            await self._channel.wait_for_state_change(state)

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


@dataclass(frozen=True)
class Workers:
    """Where an attempt runs."""

    decode: WorkerLink
    prefill: WorkerLink | None
    """None: local prefill, or the request was found running and its writer is not known."""

    @property
    def links(self) -> set[WorkerLink]:
        return {self.decode} if self.prefill is None else {self.decode, self.prefill}

    @property
    def writer(self) -> WorkerEntry:
        """Who computes the prompt's KV, as far as is known."""
        return (self.prefill or self.decode).entry

    def serve_others(
        self, worker: WorkerEntry, since_s: float, has_first_token: bool, is_running: bool
    ) -> bool:
        """Whether a worker that is silent about this attempt serves others meanwhile. A writer does
        if its other prompts come out, a decode worker if its other streams flow. It has preempted
        this attempt for memory, and elsewhere everything would be computed again.
        """
        if worker.state is WorkerState.SUSPECT:
            return False
        if self.prefill is not None and worker is self.prefill.entry:
            return not has_first_token and self.prefill.first_token_s > since_s
        return is_running and any(other.progress_s > since_s for other in self.decode.waiting)
