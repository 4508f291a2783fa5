"""Why an attempt of a request fails."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import grpc

from baton.fleet import WorkerState
from baton.link.frames import LinkError
from baton.v1 import worker_pb2
from router.fleet.fleet import WorkerEntry


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


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt is over, the request is not."""

    failure: Failure
    worker: WorkerEntry
    """The one that failed it, as far as is known."""
    message: str
    retry_after_s: float = 0.0
    field: str | None = None
    """The field of the request that the worker calls INVALID."""
    problem: str = ""  # what the client reads of it
    was_running: bool = False
    """The decode worker computed the request: it may be what the worker died of."""


_REJECTIONS = {
    worker_pb2.REJECT_REASON_NO_CAPACITY: Failure.NO_CAPACITY,
    worker_pb2.REJECT_REASON_DRAINING: Failure.DRAINING,
    worker_pb2.REJECT_REASON_FINGERPRINT: Failure.FINGERPRINT,
    worker_pb2.REJECT_REASON_INVALID: Failure.INVALID,
    worker_pb2.REJECT_REASON_TAKEN: Failure.TAKEN,
    worker_pb2.REJECT_REASON_STALE_ATTEMPT: Failure.STALE,
    worker_pb2.REJECT_REASON_HANDOFF_FAILED: Failure.HANDOFF_FAILED,
}


HANDOFF_NOT_BEGUN = {
    "DRAINING": Failure.DRAINING,
    "FINGERPRINT": Failure.FINGERPRINT,
    "REPLACED": Failure.REPLACED,
}
"""Reasons of a HandoffFailed that is none: the prompt was refused, nothing was begun."""


def rejection(rejected: worker_pb2.Rejected, decode: WorkerEntry) -> Failed:
    failure, field = _REJECTIONS.get(rejected.reason, Failure.REJECTED), rejected.field or None
    message = f"{decode.facts.worker_id}: {failure.value}: {rejected.message}"
    after_s = rejected.retry_after_ms / 1e3
    return Failed(failure, decode, message, after_s, field, rejected.message)


def failure_of_call(error: LinkError, worker: WorkerEntry) -> Failure:
    """Tell why a prefill worker ended a call with an error."""
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return Failure.INVALID
    lost = error.code() is grpc.StatusCode.UNAVAILABLE
    return loss_of(worker, Failure.PREFILL_FAILED) if lost else Failure.PREFILL_FAILED


def loss_of(worker: WorkerEntry, otherwise: Failure) -> Failure:
    """Return the failure of losing a worker. A draining one was about to leave."""
    return Failure.DRAINED if worker.state is WorkerState.DRAINING else otherwise
