"""The worker's end of a session: what one router has yet to receive.

Tokens are not queued. A session remembers each request's last sent output index and reads the rest
from the request log. So a slow router costs no memory beyond the log, and gets longer runs.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass

from decode_worker.request_log import Record, Submission, TokenRun
from kv_transfer.lease import Lease


class Refusal(enum.Enum):
    NO_CAPACITY = "no capacity"
    DRAINING = "draining"
    FINGERPRINT = "fingerprint"
    INVALID = "invalid"
    STALE_ATTEMPT = "stale attempt"
    HANDOFF_FAILED = "handoff failed"
    INTERNAL = "internal error"
    TAKEN = "request id taken"


@dataclass(frozen=True)
class Reserved:
    request_id: str
    attempt: int
    lease: Lease | None
    """None: the worker prefills the prompt itself."""
    num_cached_tokens: int


@dataclass(frozen=True)
class Rejected:
    request_id: str
    attempt: int
    refusal: Refusal
    message: str
    retry_after_s: float = 0.0
    field: str = ""
    """The wrong field of an INVALID request, as the engine names it."""


@dataclass(frozen=True)
class Admitted:
    request_id: str
    attempt: int


@dataclass(frozen=True)
class Moved:
    """Another session has attached the request."""

    request_id: str
    attempt: int


Notice = Reserved | Rejected | Admitted | Moved


@dataclass(frozen=True)
class Update:
    """One message to the router: everything new since the previous message."""

    reserved: tuple[Reserved, ...]
    rejected: tuple[Rejected, ...]
    admitted: tuple[Admitted, ...]
    moved: tuple[Moved, ...]
    tokens: tuple[TokenRun, ...]


class RouterSession:
    """Owned by the event loop. Notices collect until `flush` wakes the stream."""

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

    def reject(
        self,
        submission: Submission,
        refusal: Refusal,
        message: str,
        retry_after_s: float = 0.0,
        field: str = "",
    ) -> None:
        request_id, attempt = submission.request_id, submission.attempt
        self.notice(Rejected(request_id, attempt, refusal, message, retry_after_s, field))
        self.flush()

    def changed(self, record: Record) -> None:
        """A followed request has new tokens or has ended."""
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
        return Update(
            tuple(n for n in notices if isinstance(n, Reserved)),
            tuple(n for n in notices if isinstance(n, Rejected)),
            tuple(n for n in notices if isinstance(n, Admitted)),
            tuple(n for n in notices if isinstance(n, Moved)),
            tuple(tokens),
        )
