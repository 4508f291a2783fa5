"""The link's side of the prefill role. Protobuf messages stop here."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from baton.errors import InvalidRequestError
from baton.link.frames import Method
from baton.link.worker_end import CallContext, streams
from baton.status import abort
from baton.v1 import worker_pb2
from baton.wire import field_on_wire, finish_reason_on_wire
from engine import errors
from engine.request import PrefilledEvent
from engine.wire import read_spec
from kv_transfer.errors import (
    FingerprintError,
    HandoffError,
    LeaseError,
    LeaseServedError,
    WrongWriterError,
)
from kv_transfer.lease import Lease, Receipt, logprobs_to_proto
from prefill_worker.role import (
    DrainingError,
    Outcome,
    PrefillRole,
    PrefillRun,
    Stopped,
)

# HandoffFailed reasons before anything was begun: the router picks another worker at no cost.
_NOT_FOR_US: dict[type[Exception], str] = {
    DrainingError: "DRAINING",
    FingerprintError: "FINGERPRINT",
    WrongWriterError: "REPLACED",
}


class PrefillService:
    def __init__(self, role: PrefillRole, kv_fingerprint: bytes) -> None:
        self._role = role
        self._kv_fingerprint = kv_fingerprint
        self.methods = {Method.PREFILL: streams(self._prefill)}
        self._asked_again: dict[tuple[str, int], bool] = {}
        """(lease id, epoch) of each running call -> whether another call asked for it since.
        Then the lease's owner ends the prefill, not the end of the first call."""

    async def _prefill(
        self, request: worker_pb2.PrefillRequest, context: CallContext
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        grant = (request.lease.lease_id, request.lease.lease_epoch)
        try:
            prefill = self._start(request)
        except (DrainingError, FingerprintError, WrongWriterError) as error:
            yield _failed(_NOT_FOR_US[type(error)], str(error))
            return
        except InvalidRequestError as error:
            await abort(context, error)
        except LeaseServedError as error:  # its owner reports how it ends
            if grant in self._asked_again:
                self._asked_again[grant] = True
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except LeaseError as error:  # malformed, or the two workers do not fit: never served
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        self._asked_again[grant] = False
        token_sent = False  # the first token, as far as this worker knows
        try:
            while (outcome := await prefill.next()) is not None:
                if isinstance(outcome, errors.InvalidRequestError):  # nothing was computed
                    field = field_on_wire(outcome.field)
                    await abort(context, InvalidRequestError(outcome.message, field=field))
                if isinstance(outcome, Stopped):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, outcome.message)
                token_sent |= isinstance(outcome, PrefilledEvent)
                yield _message(outcome)
        finally:
            # A sent token must not be sampled again. A router that abandons the request cancels it
            # at the lease's owner; a router that crashed leaves it for the next one.
            if not (self._asked_again.pop(grant) or token_sent):
                prefill.cancel()

    def _start(self, request: worker_pb2.PrefillRequest) -> PrefillRun:
        """Start a prefill. Raises what `PrefillRole.start` raises, LeaseError also for a malformed
        lease, and InvalidRequestError for a malformed request (the client's fault)."""
        wire = request.spec
        if wire.kv_fingerprint != self._kv_fingerprint:
            raise FingerprintError("this worker has another kv_fingerprint")
        timeout_s = wire.timeout_ms / 1000 if wire.HasField("timeout_ms") else None
        spec = read_spec(wire)
        try:
            lease = Lease.from_proto(request.lease)
        except ValueError as error:
            raise LeaseError(f"lease {request.lease.lease_id!r} is malformed: {error}") from error
        return self._role.start(spec, lease, timeout_s)


def _message(outcome: Outcome) -> worker_pb2.PrefillResponse:
    if isinstance(outcome, PrefilledEvent):
        return worker_pb2.PrefillResponse(
            first_token=worker_pb2.FirstToken(
                id=outcome.token.token_id,
                logprobs=logprobs_to_proto(outcome.token.logprobs),
                num_cached_tokens=outcome.num_cached_tokens,
                queue_ms=outcome.queue_s * 1000,
                prefill_ms=outcome.prefill_s * 1000,
                finished=finish_reason_on_wire(outcome.finished),
                chunk_tokens=[tokens for tokens, _, _ in outcome.chunks],
                chunk_began_ms=[began_s * 1000 for _, began_s, _ in outcome.chunks],
                chunk_ended_ms=[ended_s * 1000 for _, _, ended_s in outcome.chunks],
            )
        )
    if isinstance(outcome, Receipt):
        return worker_pb2.PrefillResponse(
            handoff_done=worker_pb2.HandoffDone(
                num_bytes=outcome.num_bytes,
                num_blocks=outcome.num_blocks,
                put_ms=outcome.put_s * 1000,
                exposed_ms=outcome.exposed_s * 1000,
            )
        )
    assert isinstance(outcome, HandoffError), outcome
    return _failed(outcome.reason.name, outcome.message)


def _failed(reason: str, message: str) -> worker_pb2.PrefillResponse:
    return worker_pb2.PrefillResponse(
        handoff_failed=worker_pb2.HandoffFailed(reason=reason, message=message)
    )
