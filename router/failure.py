"""Why attempts fail. The reaction depends on it."""

from __future__ import annotations

import enum

import grpc
import grpc.aio

from baton.v1 import worker_pb2
from router.fleet import WorkerEntry, WorkerState


class Failure(enum.Enum):
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
    MOVED = "moved"  # another router went on with the request
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
_NOT_BEGUN = {
    "DRAINING": Failure.DRAINING,
    "FINGERPRINT": Failure.FINGERPRINT,
    "REPLACED": Failure.REPLACED,
}


def failure_of(rejected: worker_pb2.Rejected) -> Failure:
    return _REJECTIONS.get(rejected.reason, Failure.REJECTED)


def failure_of_handoff(failed: worker_pb2.HandoffFailed) -> Failure:
    return _NOT_BEGUN.get(failed.reason, Failure.HANDOFF_FAILED)


def failure_of_call(error: grpc.aio.AioRpcError, worker: WorkerEntry) -> Failure:
    """Why a prefill worker ended a call with an error."""
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return Failure.INVALID
    lost = error.code() is grpc.StatusCode.UNAVAILABLE
    return loss_of(worker, Failure.PREFILL_FAILED) if lost else Failure.PREFILL_FAILED


def loss_of(worker: WorkerEntry, otherwise: Failure) -> Failure:
    """The failure of losing a worker. A draining one was about to leave."""
    return Failure.DRAINED if worker.state is WorkerState.DRAINING else otherwise
