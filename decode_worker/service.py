"""The link's side of the decode role. Protobuf messages stop here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from baton.errors import InvalidRequestError
from baton.link.frames import TOKENS_ROOM, Method
from baton.link.worker_end import CallContext, Served, answers
from baton.v1 import common_pb2, worker_pb2
from baton.wire import field_on_wire, finish_reason_on_wire
from decode_worker.request_log import (
    NoSessionError,
    NotHereError,
    OtherBodyError,
    Submission,
    TokenRun,
)
from decode_worker.role import DecodeRole
from decode_worker.session import (
    Admitted,
    Moved,
    Refusal,
    Rejected,
    Reserved,
    RouterSession,
    ToEnd,
    Update,
)
from engine.wire import read_spec
from kv_transfer.lease import WorkerIdentity, logprobs_from_proto, logprobs_to_proto

log = logging.getLogger(__name__)

_REASON_OF = {
    refusal: worker_pb2.RejectReason.Value(f"REJECT_REASON_{refusal.name}") for refusal in Refusal
}


class DecodeService:
    def __init__(self, role: DecodeRole) -> None:
        self._role = role
        self.methods = {
            Method.SESSION: Served(self._session, TOKENS_ROOM),
            Method.ATTACH: answers(self._attach),
            Method.CANCEL: answers(self._cancel),
        }

    async def _session(
        self, requests: AsyncIterator[worker_pb2.SessionRequest], context: CallContext
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        first = await anext(requests)
        if not first.open.router_id:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "a session begins with `open` and a router_id"
            )
        session = self._role.open_session(first.open.router_id)
        reader = asyncio.create_task(self._read(session, requests))
        self._role.watch(reader)
        try:
            async for update in session.updates():
                yield _update_message(update)
        finally:
            reader.cancel()
            self._role.close_session(session)

    async def _read(
        self, session: RouterSession, requests: AsyncIterator[worker_pb2.SessionRequest]
    ) -> None:
        try:
            async for request in requests:
                if request.HasField("reserve"):
                    self._reserve(session, request.reserve)
                elif request.HasField("cancel"):
                    self._role.cancel(session, request.cancel.request_id, request.cancel.attempt)
                elif request.HasField("ended"):
                    self._role.ended(session, request.ended.request_id, request.ended.found)
        finally:
            session.close()

    def _reserve(self, session: RouterSession, message: worker_pb2.Reserve) -> None:
        wire = message.spec
        name = (wire.request_id, wire.attempt)
        try:
            submission, writer = self._submission(message)
            self._role.submit(session, submission, writer)
        except InvalidRequestError as error:
            field = error.field or ""
            session.notice(Rejected(*name, Refusal.INVALID, error.message, field=field))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # A bug of the worker or the router, in this message only. The session's other requests
            # continue.
            log.exception("request %r cannot be taken", wire.request_id)
            text = f"it cannot be taken: {error!r}"
            session.notice(Rejected(*name, Refusal.INTERNAL, text))

    def _submission(self, message: worker_pb2.Reserve) -> tuple[Submission, WorkerIdentity | None]:
        """Read the submission, and the writer if there is one.

        Raises InvalidRequestError for a malformed request. Raises ValueError for a router's fault:
        a malformed writer, or a number of log-probabilities other than of emitted tokens.
        """
        wire = message.spec
        spec, writer = read_spec(wire), None
        if message.HasField("writer"):
            writer = WorkerIdentity.from_proto(message.writer)
        known = message.emitted_logprobs
        if len(known) not in (0, spec.num_emitted_tokens):
            raise ValueError(f"{len(known)} emitted_logprobs of {spec.num_emitted_tokens} tokens")
        submission = Submission(
            spec=spec,
            request_id=wire.request_id,
            attempt=wire.attempt,
            tenant=wire.tenant,
            body_digest=wire.body_digest,
            kv_fingerprint=wire.kv_fingerprint,
            timeout_s=wire.timeout_ms / 1000 if wire.HasField("timeout_ms") else None,
            wire=wire.SerializeToString(),
            emitted_logprobs=tuple(map(logprobs_from_proto, known)),
        )
        return submission, writer

    async def _cancel(
        self, request: worker_pb2.Cancel, context: CallContext
    ) -> worker_pb2.CancelResponse:
        return worker_pb2.CancelResponse(found=await self._role.end_for_client(request.request_id))

    async def _attach(
        self, request: worker_pb2.AttachRequest, context: CallContext
    ) -> worker_pb2.AttachResponse:
        try:
            record = self._role.attach(
                request.router_id,
                request.request_id,
                request.tenant,
                request.body_digest,
                request.seed if request.HasField("seed") else None,
                request.attempt if request.HasField("attempt") else None,
            )
        except NotHereError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except OtherBodyError as error:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, str(error))
        except NoSessionError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return worker_pb2.AttachResponse(
            spec=worker_pb2.RequestSpec.FromString(record.submission.wire),
            tokens=_tokens_message(record.since(0)),
        )


def _update_message(update: Update) -> worker_pb2.SessionResponse:
    message = worker_pb2.SessionResponse(tokens=map(_tokens_message, update.tokens))
    for notice in update.notices:
        attempt = {"request_id": notice.request_id, "attempt": notice.attempt}
        match notice:
            case Reserved():
                message.reserved.add(
                    **attempt,
                    lease=None if notice.lease is None else notice.lease.to_proto(),
                    num_cached_tokens=notice.num_cached_tokens,
                )
            case Rejected():
                message.rejected.add(
                    **attempt,
                    reason=_REASON_OF[notice.refusal],
                    message=notice.message,
                    retry_after_ms=round(notice.retry_after_s * 1000),
                    field=field_on_wire(notice.field),
                )
            case Admitted():
                message.admitted.add(**attempt)
            case Moved():
                message.moved.add(**attempt)
            case ToEnd():
                message.end.append(notice.request_id)
    return message


def _tokens_message(run: TokenRun) -> worker_pb2.RequestTokens:
    """Build a message of tokens. Those that an earlier attempt emitted may have no logprobs."""
    return worker_pb2.RequestTokens(
        request_id=run.request_id,
        attempt=run.attempt,
        index=run.index,
        ids=run.token_ids,
        logprobs=[logprobs_to_proto(known) or common_pb2.Logprobs() for known in run.logprobs],
        finished=finish_reason_on_wire(run.finished),
        error=run.error,
        num_cached_tokens=run.num_cached_tokens,
    )
