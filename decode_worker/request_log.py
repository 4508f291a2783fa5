"""What every request on this worker has emitted, so that any router can resume it.

A record lives from the request's reservation until `forget`, or until `finished_ttl_s` after its
end. It holds the output from index 0: tokens of earlier attempts, the first token of a handoff, and
the tokens decoded here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.finish_reason import FinishReason
from engine.request import RequestSpec, SampledToken, TokenLogprobs

_TOKEN_BYTES = 40  # an integer and its list entry


class NotHereError(LookupError):
    """No such request is known here to this tenant."""


class OtherBodyError(ValueError):
    """The request id runs here with another body, seed or attempt, or for another router."""


class StaleAttemptError(ValueError):
    """This attempt, or a newer one, is known here."""


class NoSessionError(LookupError):
    """The router that attaches has no open session here."""


def _num_bytes(logprobs: TokenLogprobs | None) -> int:
    if logprobs is None:
        return 0
    return _TOKEN_BYTES * (4 + 4 * len(logprobs.top)) + sum(map(_num_bytes, logprobs.prompt))


@dataclass(frozen=True)
class Submission:
    """One attempt of a request as a router submitted it.

    `spec.request_id` is the engine's key, which the role makes unique. `request_id` is the
    router's. `wire` is the request's message; a router that attaches gets it back.
    `emitted_logprobs` has one entry per token of earlier attempts, None where unknown; it is empty
    if none is known.
    """

    spec: RequestSpec
    request_id: str
    attempt: int
    tenant: str
    body_digest: bytes
    kv_fingerprint: bytes
    timeout_s: float | None
    wire: bytes
    emitted_logprobs: tuple[TokenLogprobs | None, ...] = ()

    def deadline_s(self, now_s: float) -> float | None:
        """Return the deadline of a request that is taken at `now_s`; None: it has none."""
        return None if self.timeout_s is None else now_s + self.timeout_s


@dataclass(frozen=True)
class _Known:
    """What distinguishes an attempt from others with the same request id."""

    tenant: str
    body_digest: bytes
    attempt: int

    @classmethod
    def of(cls, submission: Submission) -> _Known:
        return cls(submission.tenant, submission.body_digest, submission.attempt)


@dataclass(frozen=True)
class TokenRun:
    """Consecutive output tokens from `index` on. `logprobs` is empty or has one per token."""

    request_id: str
    attempt: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    finished: FinishReason | None
    error: str
    num_cached_tokens: int


@dataclass
class Record:
    """The output of one request. Only the decode role writes it."""

    submission: Submission
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finished: FinishReason | None = None
    error: str = ""
    num_cached_tokens: int = 0
    finished_at_s: float = 0.0

    def append(self, index: int, token: SampledToken) -> None:
        """Append the next token. Any other index is a bug in the engine."""
        assert index == len(self.token_ids), (
            self.submission.request_id,
            index,
            len(self.token_ids),
        )
        self.token_ids.append(token.token_id)
        if self._keeps_logprobs:
            self.logprobs.append(token.logprobs)

    def since(self, index: int) -> TokenRun:
        """Return the output from `index` on, and the finish reason if the request has ended."""
        return TokenRun(
            self.submission.request_id,
            self.submission.attempt,
            index,
            tuple(self.token_ids[index:]),
            tuple(self.logprobs[index:]),
            self.finished,
            self.error,
            self.num_cached_tokens,
        )

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the record; constant once the request has ended."""
        submission = self.submission
        prompt = len(submission.wire) + submission.spec.token_ids.nbytes
        return prompt + _TOKEN_BYTES * len(self.token_ids) + sum(map(_num_bytes, self.logprobs))

    @property
    def _keeps_logprobs(self) -> bool:
        return self.submission.spec.sampling.logprobs is not None


class RequestLog:
    """Own the records, by the router's request id."""

    def __init__(self, finished_ttl_s: float, max_finished: int, max_finished_bytes: int) -> None:
        self._finished_ttl_s = finished_ttl_s
        self._max_finished, self._max_finished_bytes = max_finished, max_finished_bytes
        self._finished_bytes = 0
        self._records: dict[str, Record] = {}
        self._finished: dict[str, Record] = {}  # in order of their end
        self._used_up: dict[str, tuple[_Known, float]] = {}  # without a record, and since when

    def __len__(self) -> int:
        return len(self._records)

    def open(self, submission: Submission) -> Record:
        """Begin a record with the tokens of earlier attempts; replaces the older record."""
        self.forget(submission.request_id)
        record = Record(submission)
        spec = submission.spec
        emitted = spec.token_ids[spec.num_prompt_tokens :].tolist()
        logprobs = submission.emitted_logprobs or [None] * len(emitted)
        for index, (token_id, known) in enumerate(zip(emitted, logprobs, strict=True)):
            record.append(index, SampledToken(token_id, known))
        self._records[submission.request_id] = record
        return record

    def find_for(
        self,
        request_id: str,
        tenant: str,
        body_digest: bytes,
        seed: int | None,
        attempt: int | None,
    ) -> Record:
        """Find a record and check it against the digest, seed and attempt that are given.

        Raises NotHereError, OtherBodyError.
        """
        record = self._records.get(request_id)
        if record is None or record.submission.tenant != tenant:
            raise NotHereError(f"no request {request_id!r} here")
        if body_digest and body_digest != record.submission.body_digest:
            raise OtherBodyError(f"request {request_id!r} has another body")
        runs_with = record.submission.spec.sampling.seed
        if seed not in (None, runs_with):
            raise OtherBodyError(f"request {request_id!r} runs with seed {runs_with}")
        if attempt not in (None, record.submission.attempt):
            newest = record.submission.attempt
            raise OtherBodyError(f"request {request_id!r} runs in attempt {newest}")
        return record

    def check_new(self, submission: Submission) -> None:
        """Check that an attempt may begin here. Raises OtherBodyError or StaleAttemptError.

        An aborted request's id may be reused for another body, but only with a higher attempt
        number: messages carry nothing else to distinguish attempts.
        """
        was = self._newest(submission.request_id)
        if was is None:
            return
        record = self._records.get(submission.request_id)
        is_free = record is None or record.finished is FinishReason.ABORTED
        has_other_body = was.body_digest != submission.body_digest
        if was.tenant != submission.tenant or (has_other_body and not is_free):
            raise OtherBodyError(f"request id {submission.request_id!r} is taken")
        if submission.attempt <= was.attempt:
            raise StaleAttemptError(f"attempt {was.attempt} is known here")

    def use_up(self, submission: Submission, now_s: float) -> None:
        """Remember an attempt without a record, so that it is not served again."""
        self._used_up.pop(submission.request_id, None)  # the newest is last
        self._used_up[submission.request_id] = (_Known.of(submission), now_s)
        if len(self._used_up) > self._max_finished:
            del self._used_up[next(iter(self._used_up))]

    def _newest(self, request_id: str) -> _Known | None:
        """The newest remembered attempt of a request."""
        record = self._records.get(request_id)
        if record is not None:
            return _Known.of(record.submission)
        return self._used_up.get(request_id, (None, 0.0))[0]

    def finish(self, record: Record, reason: FinishReason, error: str, now_s: float) -> None:
        record.finished, record.error, record.finished_at_s = reason, error, now_s
        request_id = record.submission.request_id
        if self._records.get(request_id) is not record:
            return  # replaced by a newer attempt
        self._finished[request_id] = record
        self._finished_bytes += record.num_bytes
        while (
            len(self._finished) > self._max_finished
            or self._finished_bytes > self._max_finished_bytes
        ):
            self.forget(next(iter(self._finished)))

    def forget(self, request_id: str) -> None:
        self._records.pop(request_id, None)
        finished = self._finished.pop(request_id, None)
        if finished is not None:
            self._finished_bytes -= finished.num_bytes
        self._used_up.pop(request_id, None)

    def expire(self, now_s: float) -> None:
        """Forget records that finished at least `finished_ttl_s` ago."""
        while self._finished:
            request_id, record = next(iter(self._finished.items()))
            if now_s - record.finished_at_s < self._finished_ttl_s:
                break
            self.forget(request_id)
        while self._used_up:
            request_id, (_, since_s) = next(iter(self._used_up.items()))
            if now_s - since_s < self._finished_ttl_s:
                break
            del self._used_up[request_id]
