"""Why attempts fail, and what follows: whether another may follow, when, and on which workers not.

Each failure ends in one of three ways: the next attempt is free (nothing was done, or nobody is to
blame); it costs a retry and avoids the worker; or the request ends with a BatonError.
"""

from __future__ import annotations

import enum
import logging

import grpc
import grpc.aio

from baton.errors import (
    AlreadyExistsError,
    BatonError,
    DeadlineError,
    InvalidRequestError,
    KvTransferError,
    PoisonError,
    UnavailableError,
    WorkerLostError,
)
from baton.v1 import router_pb2, worker_pb2
from router.fleet.fleet import WorkerEntry, WorkerState
from router.request.output import OutputLog
from router.request.run_parts import Arrival, RunParts


class Failure(enum.Enum):
    """Why an attempt failed. The reaction depends on it."""

    NO_CAPACITY = "no capacity"
    DRAINING = "draining"  # it takes nothing more
    DRAINED = "drained"  # it was lost while it drained, as it had to be some time
    LEFT = "left"  # before anything was asked of it
    FINGERPRINT = "another kv_fingerprint"
    REPLACED = "replaced"  # another start of the worker has its address
    INVALID = "invalid"
    TAKEN = "request id taken"
    STALE = "stale attempt"
    REJECTED = "rejected"  # it could not take the request in: a fault of its, or of the message
    PREFILL_FAILED = "prefill failed"
    HANDOFF_FAILED = "handoff failed"
    WRITER_UNKNOWN = "handoff failed, and another router had asked for it"
    MOVED = "moved"  # another router continued the request
    GIVEN_UP = "given up"  # before this router attached it
    DECODE_LOST = "decode worker lost"
    DECODE_FAILED = "decode failed"
    STUCK = "stuck"
    DEADLINE = "deadline"  # it passed at the decode worker first


class AttemptError(Exception):
    """The attempt is over, the request is not. `worker`: the one that failed it, if known."""

    def __init__(
        self,
        failure: Failure,
        worker: WorkerEntry,
        message: str,
        retry_after_s: float = 0.0,
        field: str | None = None,
    ) -> None:
        """`field`: the request's field that the worker calls INVALID."""
        super().__init__(message)
        self.failure, self.worker, self.message = failure, worker, message
        self.retry_after_s, self.field = retry_after_s, field


_REJECTIONS = {
    worker_pb2.REJECT_REASON_NO_CAPACITY: Failure.NO_CAPACITY,
    worker_pb2.REJECT_REASON_DRAINING: Failure.DRAINING,
    worker_pb2.REJECT_REASON_FINGERPRINT: Failure.FINGERPRINT,
    worker_pb2.REJECT_REASON_INVALID: Failure.INVALID,
    worker_pb2.REJECT_REASON_TAKEN: Failure.TAKEN,
    worker_pb2.REJECT_REASON_STALE_ATTEMPT: Failure.STALE,
    worker_pb2.REJECT_REASON_HANDOFF_FAILED: Failure.HANDOFF_FAILED,
}


# Reasons of a HandoffFailed that is none: the prompt was refused, nothing was begun.
_HANDOFF_NOT_BEGUN = {
    "DRAINING": Failure.DRAINING,
    "FINGERPRINT": Failure.FINGERPRINT,
    "REPLACED": Failure.REPLACED,
}


def failure_of(rejected: worker_pb2.Rejected) -> Failure:
    return _REJECTIONS.get(rejected.reason, Failure.REJECTED)


def failure_of_handoff(failed: worker_pb2.HandoffFailed) -> Failure:
    return _HANDOFF_NOT_BEGUN.get(failed.reason, Failure.HANDOFF_FAILED)


def failure_of_call(error: grpc.aio.AioRpcError, worker: WorkerEntry) -> Failure:
    """Why a prefill worker ended a call with an error."""
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return Failure.INVALID
    lost = error.code() is grpc.StatusCode.UNAVAILABLE
    return loss_of(worker, Failure.PREFILL_FAILED) if lost else Failure.PREFILL_FAILED


def loss_of(worker: WorkerEntry, otherwise: Failure) -> Failure:
    """The failure of losing a worker. A draining one was about to leave."""
    return Failure.DRAINED if worker.state is WorkerState.DRAINING else otherwise


log = logging.getLogger(__name__)

MAX_STALE = 10  # attempt numbers are raised fourfold each time: no request had so many
OUT_OF_TIME = "the request's deadline has passed"
MIN_HOLD_S = 0.05  # a worker that has no room is not asked again sooner
_OF_TRANSFER = (Failure.HANDOFF_FAILED, Failure.WRITER_UNKNOWN, Failure.PREFILL_FAILED)
_NOT_BEGUN = (
    Failure.NO_CAPACITY,
    Failure.FINGERPRINT,
    Failure.REPLACED,
    Failure.DRAINING,
    Failure.LEFT,
)


class Retrying:
    """Own a request's attempt numbers and what its failed attempts have cost it."""

    def __init__(self, arrival: Arrival, parts: RunParts, output: OutputLog) -> None:
        self._request_id, self._tenant = arrival.request_id, arrival.parsed.tenant
        self._parts, self._output = parts, output
        self.attempt_number = 0
        """Of the newest attempt; 0 before the first."""
        self.failed: set[tuple[str, int]] = set()
        """(worker id, incarnation) of whom the request is kept from."""
        self._lost: list[tuple[str, int]] = []  # the same, lost while it ran there
        self._rejected_by: set[tuple[str, int]] = set()
        self.num_failures = self._num_stale = 0

    def begin_attempt(self) -> None:
        self.attempt_number += 1

    def go_on_with(self, attempt_number: int) -> None:
        """An attempt that another router began."""
        self.attempt_number = attempt_number

    def lost_while_running(self, worker: WorkerEntry) -> None:
        """The request may be what its decode worker died of."""
        self._lost.append(worker.facts.identity)

    def taken_in(self, worker: WorkerEntry) -> None:
        """A worker has room for the request and could read it. So a worker that could not is sick
        itself."""
        fleet, config = self._parts.fleet, self._parts.config
        self._rejected_by.discard(worker.facts.identity)
        for slot in fleet.slots_of(self._rejected_by):
            fleet.eject(fleet.at(slot), config.eject_s)
        self._rejected_by.clear()

    def judge(self, error: AttemptError) -> float:
        """Book a failed attempt; seconds until the next one. Raises BatonError when none may
        follow."""
        parts, failure = self._parts, error.failure
        parts.metrics.failures.labels(failure.name).inc()
        log.info("request %s: attempt %d: %s", self._request_id, self.attempt_number, error.message)
        if ending := _ending(error):
            raise ending
        if self._was_not_begun(error):
            return 0.0
        if self._output.ids:
            parts.metrics.migrations.inc()
            num_out = len(self._output.ids)
            self._output.mark(router_pb2.Migrated(from_index=num_out, reason=error.message))
        if failure in (Failure.DRAINED, Failure.GIVEN_UP):
            return 0.0
        if failure is Failure.STALE:
            self._outnumber(error)
            return 0.0
        self.num_failures += 1
        self._give_up_if_hopeless(error)
        self._blame(error)
        return parts.config.retry_backoff_s if self.num_failures > 1 else 0.0

    def _was_not_begun(self, error: AttemptError) -> bool:
        """Whether the worker is not to blame, and is only left alone for now."""
        fleet, failure = self._parts.fleet, error.failure
        if failure is Failure.NO_CAPACITY:
            fleet.hold(error.worker, max(MIN_HOLD_S, error.retry_after_s))
        elif failure in (
            Failure.FINGERPRINT,
            Failure.REPLACED,
        ):  # the registry will report it
            fleet.hold(error.worker, self._parts.config.eject_s)
        elif failure is Failure.DRAINING:
            fleet.set_state(error.worker, WorkerState.DRAINING)
        return failure in _NOT_BEGUN

    def _blame(self, error: AttemptError) -> None:
        """Keep a worker that failed from this request, and for a while from all others."""
        if error.failure is Failure.WRITER_UNKNOWN:
            return
        self.failed.add(error.worker.facts.identity)
        if error.failure is Failure.REJECTED:  # is it the request, or the worker?
            self._rejected_by.add(error.worker.facts.identity)
        else:
            self._parts.fleet.eject(error.worker, self._parts.config.eject_s)

    def _outnumber(self, error: AttemptError) -> None:
        """The worker knows a later attempt of this id. It is not to blame and stays in use."""
        self._num_stale += 1
        self.attempt_number += 4**self._num_stale
        if self._num_stale >= MAX_STALE:
            raise _final(error, f"{self._num_stale} times")

    def _give_up_if_hopeless(self, error: AttemptError) -> None:
        config = self._parts.config
        dead = [lost for lost in self._lost if not self._parts.links.find(*lost)]
        if len(dead) >= config.max_dead_decode_workers:
            names = ", ".join(worker_id for worker_id, _ in dead)
            raise PoisonError(f"{len(dead)} workers died while they ran this request: {names}")
        if error.failure is Failure.REJECTED and self._rejected_by - {error.worker.facts.identity}:
            raise BatonError(f"{error.message} (a second worker could not take it in)")
        if self.num_failures >= config.max_attempts:
            raise _final(error, f"after {self.num_failures} attempts")
        if not self._parts.retries.take(self._tenant):
            raise _final(error, "and the retry budget is used up")


def _final(error: AttemptError, why: str) -> BatonError:
    if error.failure in _OF_TRANSFER:
        return KvTransferError(f"{error.message} ({why})", retry_after_s=1.0)
    return WorkerLostError(f"{error.message} ({why})", retry_after_s=1.0)


def _ending(error: AttemptError) -> BatonError | None:
    """Of a failure after which no other attempt makes sense."""
    if error.failure is Failure.INVALID:
        return InvalidRequestError(error.message, field=error.field)
    if error.failure is Failure.TAKEN:
        return AlreadyExistsError(error.message, field="request_id")
    if error.failure is Failure.DEADLINE:
        return DeadlineError(OUT_OF_TIME)
    if error.failure is Failure.MOVED:
        return UnavailableError("another router continues the request", retry_after_s=0.0)
    return None
