"""The attempts on this worker that have not ended, by engine key and by request id."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from baton.wire import DEADLINE, ORPHANED
from decode_worker.request_log import Record, Submission
from decode_worker.session import Moved, Notice, Reserved, RouterSession
from engine.request import RequestId, SampledToken, TokenLogprobs
from kv_transfer.lease import FirstToken, Lease, LeaseId


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

    @property
    def key(self) -> RequestId:
        return self.submission.spec.request_id

    @property
    def lease_id(self) -> LeaseId | None:
        lease = None if self.reserved is None else self.reserved.lease
        return None if lease is None else lease.lease_id

    def move_to(self, session: RouterSession) -> None:
        """Send later tokens to `session`, and `Moved` to the session that followed it."""
        request_id = self.submission.request_id
        if self.session is not None and self.session is not session:
            self.session.drop(request_id)
            self.notify(Moved(request_id, self.submission.attempt))
        self.session, self.router, self.orphaned_at_s = session, session.router, None
        session.follow(self.record, sent=len(self.record.token_ids))
        if self.reserved is not None:  # the lost router may never have passed it to the writer
            self.notify(self.reserved)

    def left_s(self, now_s: float, otherwise_s: float) -> float:
        """Seconds until the deadline; `otherwise_s` without one."""
        return otherwise_s if self.deadline_s is None else max(0.0, self.deadline_s - now_s)

    def overdue(self, now_s: float, orphan_ttl_s: float) -> str | None:
        """Why the attempt must end now; None if it may continue."""
        if self.deadline_s is not None and now_s >= self.deadline_s:
            return DEADLINE
        if self.orphaned_at_s is not None and now_s - self.orphaned_at_s >= orphan_ttl_s:
            return ORPHANED
        return None

    def granted(self, lease: Lease, num_cached_tokens: int) -> None:
        """The writer may write from now on; the router that follows asks it to."""
        self.phase = Phase.LEASED
        request_id, attempt = self.submission.request_id, self.submission.attempt
        self.reserved = Reserved(request_id, attempt, lease, num_cached_tokens)
        self.notify(self.reserved)

    def notify(self, notice: Notice) -> None:
        """Send a notice to the router that follows it, if any."""
        if self.session is not None:
            self.session.notice(notice)
            self.session.flush()

    def notify_output(self) -> None:
        """Send new tokens, and the end if it has ended."""
        if self.session is not None:
            self.session.changed(self.record)
            self.session.flush()


def sampled_token(first: FirstToken) -> SampledToken:
    """A writer's first token as the engine's type."""
    logprobs = first.logprobs
    if logprobs is None:
        return SampledToken(first.token_id)
    return SampledToken(
        first.token_id, TokenLogprobs(logprobs.logprob, logprobs.rank, logprobs.top)
    )


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
