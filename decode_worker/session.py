"""The worker's end of a session: what one router has yet to receive, and the attempts it follows.

Tokens are not queued. A session remembers each request's last sent output index and reads the rest
from the request log. So a slow router costs no memory beyond the log, and gets longer runs.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from baton.wire import DEADLINE, ORPHANED
from decode_worker.request_log import Record, Submission, TokenRun
from engine.request import RequestId, SampledToken
from kv_transfer.lease import FirstToken, Lease, LeaseId


class Refusal(enum.Enum):
    """Why a worker refuses an attempt, named as on the wire."""

    NO_CAPACITY = "no capacity"
    DRAINING = "draining"
    FINGERPRINT = "fingerprint"
    INVALID = "invalid"
    STALE_ATTEMPT = "stale attempt"
    HANDOFF_FAILED = "handoff failed"
    INTERNAL = "internal error"
    TAKEN = "request id taken"


@dataclass(frozen=True)
class Notice:
    """What a router must know of one attempt, besides its tokens."""

    request_id: str
    attempt: int


@dataclass(frozen=True)
class Reserved(Notice):
    lease: Lease | None
    """None: the worker prefills the prompt itself."""
    num_cached_tokens: int


@dataclass(frozen=True)
class Rejected(Notice):
    refusal: Refusal
    message: str
    retry_after_s: float = 0.0
    field: str = ""
    """The wrong field of an INVALID request, as the engine names it."""


@dataclass(frozen=True)
class Admitted(Notice):
    """All KV has arrived."""


@dataclass(frozen=True)
class Moved(Notice):
    """Another session has attached the request."""


@dataclass(frozen=True)
class ToEnd(Notice):
    """A client wants the request ended, which does not run here. It may wait at the router."""


@dataclass(frozen=True)
class Ending:
    """A request that routers were asked to end, by the sessions that have yet to answer."""

    unheard: set[str]
    was_found: asyncio.Future[bool]

    def answer(self, router_id: str, was_found: bool) -> None:
        self.unheard.discard(router_id)
        if (was_found or not self.unheard) and not self.was_found.done():
            self.was_found.set_result(was_found)


@dataclass(frozen=True)
class Update:
    """One message to the router: everything new since the previous message."""

    notices: tuple[Notice, ...]
    tokens: tuple[TokenRun, ...]


class RouterSession:
    """What one router has yet to be sent. New tokens collect until `flush` wakes the stream."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.router = router_id.rsplit("/", 1)[0]
        """The router's name; its session ids are `<router>/<n>`."""
        self.closed = False
        self._sending = False
        self._notices: list[Notice] = []
        self._news: dict[str, Record] = {}
        self._sent: dict[str, int] = {}  # output tokens this router has, by request
        self._wake = asyncio.Event()

    def follow(self, record: Record, sent: int) -> None:
        """Send this router the request's tokens, starting at output index `sent`."""
        request_id = record.submission.request_id
        self._news.pop(request_id, None)  # of the previous attempt
        self._sent[request_id] = sent

    def drop(self, request_id: str) -> None:
        """Send this router nothing more about a request."""
        self._sent.pop(request_id, None)
        self._news.pop(request_id, None)

    def notice(self, what: Notice) -> None:
        self._notices.append(what)
        self.flush()

    def changed(self, record: Record) -> None:
        """Note that a followed request has new tokens or has ended."""
        if record.submission.request_id in self._sent:
            self._news[record.submission.request_id] = record

    def flush(self) -> None:
        self._wake.set()

    @property
    def has_sent_all(self) -> bool:
        """Whether the stream has taken everything. A router that does not read delays it."""
        return not (self._notices or self._news or self._sending)

    def close(self) -> None:
        self.closed = True
        self._wake.set()

    async def updates(self) -> AsyncIterator[Update]:
        """Yield one update per flush, or fewer while the reader is busy. Ends when closed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.closed:
                return
            update = self._take()
            if update is not None:
                self._sending = True
                yield update
                self._sending = False

    def _take(self) -> Update | None:
        tokens = []
        for request_id, record in self._news.items():
            run = record.since(min(self._sent[request_id], len(record.token_ids)))
            if not run.token_ids and run.finished is None:
                continue
            tokens.append(run)
            self._sent[request_id] = run.index + len(run.token_ids)
            if record.finished is not None:
                del self._sent[request_id]
        notices, self._notices, self._news = self._notices, [], {}
        if not notices and not tokens:
            return None
        return Update(tuple(notices), tuple(tokens))


class Phase(enum.Enum):
    RESERVING = "reserving"
    LEASED = "leased"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class Run:
    """One attempt on this worker, from `submit` to its end. Only the decode role writes it."""

    submission: Submission
    record: Record
    session: RouterSession | None
    router: str
    """The router that submitted or last attached it, even while its session is lost."""
    phase: Phase
    deadline_s: float | None
    reserved: Reserved | None = None
    """The lease that was sent, until its handoff ends. A router that attaches gets it again."""
    orphaned_at_s: float | None = None
    first_index: int | None = None
    """Output index of the token that the writer sent."""

    @property
    def key(self) -> RequestId:
        return self.submission.spec.request_id

    @property
    def name(self) -> tuple[str, int]:
        """The router's request id, and the attempt."""
        return self.submission.request_id, self.submission.attempt

    @property
    def lease_id(self) -> LeaseId | None:
        lease = None if self.reserved is None else self.reserved.lease
        return None if lease is None else lease.lease_id

    def move_to(self, session: RouterSession) -> None:
        """Send later tokens to `session`, and `Moved` to the session that followed it."""
        request_id = self.submission.request_id
        if self.session is not None and self.session is not session:
            self.session.drop(request_id)
            self.notify(Moved(*self.name))
        self.session, self.router, self.orphaned_at_s = session, session.router, None
        session.follow(self.record, sent=len(self.record.token_ids))
        if self.reserved is not None:  # the lost router may never have passed it to the writer
            self.notify(self.reserved)

    def left_s(self, now_s: float, otherwise_s: float) -> float:
        """Return the seconds until the deadline; `otherwise_s` without one."""
        return otherwise_s if self.deadline_s is None else max(0.0, self.deadline_s - now_s)

    def overdue(self, now_s: float, orphan_ttl_s: float) -> str | None:
        """Why the attempt must end now; None if it may continue."""
        if self.deadline_s is not None and now_s >= self.deadline_s:
            return DEADLINE
        if self.orphaned_at_s is not None and now_s - self.orphaned_at_s >= orphan_ttl_s:
            return ORPHANED
        return None

    def append_first(self, first: FirstToken) -> SampledToken:
        """Record the writer's first token."""
        token = SampledToken(first.token_id, first.logprobs)
        self.first_index = len(self.record.token_ids)
        self.record.append(self.first_index, token)
        return token

    def notify(self, notice: Notice) -> None:
        """Send a notice to the router that follows it, if any."""
        if self.session is not None:
            self.session.notice(notice)

    def notify_output(self) -> None:
        """Send new tokens, and the end if it has ended."""
        if self.session is not None:
            self.session.changed(self.record)
            self.session.flush()


class Runs:
    """Own the attempts. A request has at most one here: its newest."""

    def __init__(self) -> None:
        self._by_key: dict[RequestId, Run] = {}
        self._by_request: dict[str, Run] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Run]:
        """The attempts at this moment; they may end during the iteration."""
        return iter(list(self._by_key.values()))

    def add(self, run: Run) -> None:
        self._by_key[run.key] = self._by_request[run.submission.request_id] = run

    def remove(self, run: Run) -> None:
        del self._by_key[run.key]
        if self._by_request.get(run.submission.request_id) is run:
            del self._by_request[run.submission.request_id]

    def find(self, key: str) -> Run | None:
        """Find by the engine's key, which names one attempt."""
        return self._by_key.get(RequestId(key))

    def of_request(self, request_id: str) -> Run | None:
        """Find by the router's request id."""
        return self._by_request.get(request_id)

    def orphan(self, session: RouterSession, now_s: float) -> None:
        """Mark the attempts of a lost session as orphans."""
        for run in self:
            if run.session is session:
                run.session, run.orphaned_at_s = None, now_s

    def num_orphans(self) -> int:
        return sum(run.orphaned_at_s is not None for run in self._by_key.values())

    def check_integrity(self) -> None:
        """Raise AssertionError when an attempt has two owners or none."""
        for key, run in self._by_key.items():
            assert run.key == key, (run.key, key)
            assert run.phase is not Phase.ENDED, key
            assert self._by_request.get(run.submission.request_id) is run, key
            assert (run.session is None) == (run.orphaned_at_s is not None), key
            assert run.session is None or run.session.router == run.router, (key, run.router)
            assert (run.lease_id is not None) == (run.phase is Phase.LEASED), (key, run.phase)
        num_requests, num_runs = len(self._by_request), len(self._by_key)
        assert num_requests == num_runs, (num_requests, num_runs)
