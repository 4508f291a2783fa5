"""An attempt's calls to its workers: to prefill, and to attach again in the next session.

A prefill worker sends the first token at once and the end of the handoff later. It sends nothing
more after a first token that ends the request. A decode worker whose session was lost has continued
the request, or kept its output. It gives both to the router that followed the request last, and to
no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from baton.status import from_rpc_error
from baton.v1 import worker_pb2
from router.fleet.fleet import WorkerEntry
from router.fleet.session import SessionLostError
from router.fleet.worker_link import ATTACH_AGAIN_S, PrefillCall, WorkerLink
from router.request.retrying import Failure, failure_of_call, failure_of_handoff, loss_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrefillFailed:
    """Nothing will be handed off."""

    failure: Failure
    message: str
    lost_receiver: bool = False
    """By the decode worker's fault."""
    field: str | None = None
    """Of the request, that the worker calls invalid."""


class PrefillListener(Protocol):
    """Callbacks for the prefill's progress. All run on the event loop, and none may block."""

    def on_first_token(self, first: worker_pb2.FirstToken) -> None: ...
    def on_handed_off(self, done: worker_pb2.HandoffDone) -> None: ...
    def on_prefill_failed(self, broken: PrefillFailed) -> None: ...
    def on_lease_refused(self) -> None:
        """The lease is served already, fenced or over: the session reports how it ends."""


class PrefillLeg:
    """Own an attempt's one call to its prefill worker."""

    def __init__(self, listener: PrefillListener) -> None:
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    @property
    def was_asked(self) -> bool:
        return self._task is not None

    @property
    def is_under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    def ask(self, writer: WorkerLink, request: worker_pb2.PrefillRequest, timeout_s: float) -> None:
        """The listener gets the result."""
        if writer.has_left:  # since the request was placed there
            message = f"{writer.entry.facts.worker_id} has left the fleet"
            failure = loss_of(writer.entry, Failure.PREFILL_FAILED)
            self._listener.on_prefill_failed(PrefillFailed(failure, message))
            return
        call = writer.prefill(request, timeout_s)
        self._task = asyncio.create_task(follow_prefill(call, writer.entry, self._listener))
        self._task.add_done_callback(lambda _: call.cancel())

    def then(self, do: Callable[[], None]) -> None:
        """Once it is over, which it may be already."""
        if self._task is not None and self.is_under_way:
            self._task.add_done_callback(lambda _: do())
        else:
            do()

    async def wait(self, timeout_s: float) -> None:
        if self._task is not None and self.is_under_way:
            await asyncio.wait({self._task}, timeout=timeout_s)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


async def follow_prefill(call: PrefillCall, worker: WorkerEntry, listener: PrefillListener) -> None:
    """Report a prefill to the listener, from the worker's answers to its end."""
    worker_id = worker.facts.worker_id
    is_over = False
    try:
        async for response in call:
            is_over |= _report(listener, worker_id, response)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            log.info("%s: %s", worker_id, error.details())
            listener.on_lease_refused()
        elif not is_over:
            message = f"{worker_id}: {error.code().name}: {error.details()}"
            failure, field = failure_of_call(error, worker), from_rpc_error(error).field
            listener.on_prefill_failed(PrefillFailed(failure, message, field=field))
        return
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        if not is_over:
            message = f"{worker_id} has left the fleet"
            failure = loss_of(worker, Failure.PREFILL_FAILED)
            listener.on_prefill_failed(PrefillFailed(failure, message))
        return
    if not is_over:
        message = f"{worker_id} ended its answer early"
        listener.on_prefill_failed(PrefillFailed(Failure.PREFILL_FAILED, message))


def _report(
    listener: PrefillListener, worker_id: str, response: worker_pb2.PrefillResponse
) -> bool:
    """True when nothing more has to come."""
    kind = response.WhichOneof("event")
    if kind == "first_token":
        listener.on_first_token(response.first_token)
        return bool(response.first_token.finished)
    if kind == "handoff_done":
        listener.on_handed_off(response.handoff_done)
        return True
    if kind == "handoff_failed":
        failed = response.handoff_failed
        message = f"{worker_id}: {failed.reason}: {failed.message}"
        lost_receiver = failed.reason == "PEER_LOST"
        listener.on_prefill_failed(
            PrefillFailed(failure_of_handoff(failed), message, lost_receiver)
        )
        return True
    return False


class NotAttachedError(Exception):
    """The request is not there any more, or the worker did not come back in time."""


class TakenOverError(Exception):
    """Another router has attached the request since, or has begun a newer attempt of it."""


async def attach_again(
    link: WorkerLink, spec: worker_pb2.RequestSpec, listen: Callable[[], None], timeout_s: float
) -> worker_pb2.AttachResponse:
    """Attach to the attempt that `spec` began, in the session that comes next.

    `listen` is called before the worker is asked: tokens may come before the answer that leads up
    to them. Raises NotAttachedError, TakenOverError.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _ask(link, spec, listen, timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.ALREADY_EXISTS:
            raise TakenOverError(error.details()) from None
        raise NotAttachedError(error.details()) from None
    except (TimeoutError, SessionLostError) as error:
        raise NotAttachedError(str(error) or "no answer") from None


async def _ask(
    link: WorkerLink, spec: worker_pb2.RequestSpec, listen: Callable[[], None], timeout_s: float
) -> worker_pb2.AttachResponse:
    """Again whenever the connection breaks under way; until cancelled."""
    while True:
        await link.session.wait_open()
        listen()
        try:
            return await link.attach(
                spec.request_id, spec.tenant, spec.body_digest, spec.seed, timeout_s, spec.attempt
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        await asyncio.sleep(ATTACH_AGAIN_S)
