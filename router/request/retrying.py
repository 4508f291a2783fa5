"""Why attempts fail, and what follows: whether another may follow, when, and on which workers not.

Each failure ends in one of three ways: the next attempt is free (nothing was done, or nobody is to
blame); it costs a retry and avoids the worker; or the request ends with a BatonError.
"""

from __future__ import annotations

import logging

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
from baton.fleet import WorkerState
from baton.v1 import router_pb2
from router.fleet.fleet import WorkerEntry
from router.request.client_request import RequestHead
from router.request.failure import Failed, Failure
from router.request.output import OutputLog
from router.request.run_parts import RunParts

log = logging.getLogger(__name__)

MAX_STALE = 10  # attempt numbers are raised fourfold each time: no request had so many
OUT_OF_TIME = "the request's deadline has passed"
MIN_HOLD_S = 0.05  # a worker that has no room is not asked again sooner
_OF_TRANSFER = (Failure.HANDOFF_FAILED, Failure.WRITER_UNKNOWN, Failure.PREFILL_FAILED)


class Retrying:
    """Own a request's attempt numbers and what its failed attempts have cost it."""

    def __init__(self, head: RequestHead, parts: RunParts, output: OutputLog) -> None:
        self._request_id, self._tenant = head.request_id, head.tenant
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
        """Go on with an attempt that another router began."""
        self.attempt_number = attempt_number

    def taken_in(self, worker: WorkerEntry) -> None:
        """Note that a worker has room for the request and could read it. So a worker that could not
        is sick itself."""
        fleet, config = self._parts.fleet, self._parts.config
        self._rejected_by.discard(worker.facts.identity)
        for slot in fleet.slots_of(self._rejected_by):
            fleet.eject(fleet.at(slot), config.retries.eject_s)
        self._rejected_by.clear()

    def judge(self, failed: Failed) -> float:
        """Book a failed attempt. Return the seconds until the next one, or raise BatonError when
        none may follow."""
        parts, failure = self._parts, failed.failure
        parts.metrics.failures.labels(failure.name).inc()
        fields = {"request_id": self._request_id}
        log.info("attempt %d: %s", self.attempt_number, failed.message, extra={"fields": fields})
        if failed.failure is Failure.DECODE_LOST and failed.was_running:
            self._lost.append(failed.worker.facts.identity)
        if ending := _ending(failed):
            raise ending
        if self._was_not_begun(failed):
            return 0.0
        if self._output.ids:
            parts.metrics.migrations.inc()
            num_out = len(self._output.ids)
            self._output.mark(router_pb2.Migrated(from_index=num_out, reason=failed.message))
        if failure in (Failure.DRAINED, Failure.GIVEN_UP):
            return 0.0
        if failure is Failure.STALE:
            self._outnumber(failed)
            return 0.0
        self.num_failures += 1
        self._give_up_if_hopeless(failed)
        self._blame(failed)
        return parts.config.retries.backoff_s if self.num_failures > 1 else 0.0

    def _was_not_begun(self, failed: Failed) -> bool:
        """Tell whether nothing was begun: the worker is left alone for a while, without blame."""
        fleet, worker = self._parts.fleet, failed.worker
        match failed.failure:
            case Failure.NO_CAPACITY:
                fleet.hold(worker, max(MIN_HOLD_S, failed.retry_after_s))
            case Failure.FINGERPRINT | Failure.REPLACED:  # the registry will report it
                fleet.hold(worker, self._parts.config.retries.eject_s)
            case Failure.DRAINING:
                fleet.set_state(worker, WorkerState.DRAINING)
            case _:
                return failed.failure is Failure.LEFT
        return True

    def _blame(self, failed: Failed) -> None:
        """Keep a worker that failed from this request, and for a while from all others."""
        if failed.failure is Failure.WRITER_UNKNOWN:
            return
        self.failed.add(failed.worker.facts.identity)
        if failed.failure is Failure.REJECTED:  # is it the request, or the worker?
            self._rejected_by.add(failed.worker.facts.identity)
        else:
            self._parts.fleet.eject(failed.worker, self._parts.config.retries.eject_s)

    def _outnumber(self, failed: Failed) -> None:
        """The worker knows a later attempt of this id. It is not to blame and stays in use."""
        self._num_stale += 1
        self.attempt_number += 4**self._num_stale
        if self._num_stale >= MAX_STALE:
            raise _final(failed, f"{self._num_stale} times")

    def _give_up_if_hopeless(self, failed: Failed) -> None:
        config = self._parts.config
        dead = [lost for lost in self._lost if not self._parts.links.find(*lost)]
        if len(dead) >= config.retries.max_dead_decode_workers:
            names = ", ".join(worker_id for worker_id, _ in dead)
            raise PoisonError(f"{len(dead)} workers died while they ran this request: {names}")
        others = self._rejected_by - {failed.worker.facts.identity}
        if failed.failure is Failure.REJECTED and others:
            raise BatonError(f"{failed.message} (a second worker could not take it in)")
        if self.num_failures >= config.retries.max_attempts:
            raise _final(failed, f"after {self.num_failures} attempts")
        if not self._parts.retries.take(self._tenant):
            raise _final(failed, "and the retry budget is used up")


def _final(failed: Failed, why: str) -> BatonError:
    if failed.failure in _OF_TRANSFER:
        return KvTransferError(f"{failed.message} ({why})", retry_after_s=1.0)
    return WorkerLostError(f"{failed.message} ({why})", retry_after_s=1.0)


def _ending(failed: Failed) -> BatonError | None:
    """Return the request's error, after a failure that no other attempt would mend."""
    if failed.failure is Failure.INVALID:
        named = f"{failed.field}: " if failed.field else ""
        return InvalidRequestError(named + failed.problem.removeprefix(named), field=failed.field)
    if failed.failure is Failure.TAKEN:
        return AlreadyExistsError(failed.message, field="request_id")
    if failed.failure is Failure.DEADLINE:
        return DeadlineError(OUT_OF_TIME)
    if failed.failure is Failure.MOVED:
        return UnavailableError("another router continues the request", retry_after_s=0.0)
    return None
