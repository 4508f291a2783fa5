"""An attempt's call to its prefill worker.

It sends the first token at once and the end of the handoff later. It sends nothing more after a
first token that ends the request.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import grpc
import grpc.aio

from baton.status import from_rpc_error
from baton.v1 import worker_pb2
from router.fleet.fleet import WorkerEntry
from router.fleet.worker_link import PrefillResponses, WorkerLink
from router.request.failure import Failed, Failure, failure_of_call, failure_of_handoff, loss_of

log = logging.getLogger(__name__)


class PrefillListener(Protocol):
    """Callbacks for the prefill's progress. All run on the event loop, and none may block."""

    def on_first_token(self, first: worker_pb2.FirstToken) -> None: ...
    def on_handed_off(self, done: worker_pb2.HandoffDone) -> None: ...
    def on_prefill_failed(self, failed: Failed) -> None: ...
    def on_lease_refused(self) -> None:
        """The lease is served already, fenced or over: the session reports how it ends."""


class PrefillCall:
    """Own an attempt's one call to its prefill worker."""

    def __init__(
        self,
        writer: WorkerLink,
        receiver: WorkerEntry,
        request: worker_pb2.PrefillRequest,
        timeout_s: float,
        listener: PrefillListener,
    ) -> None:
        """`receiver`: the decode worker that the prompt's KV goes to."""
        self._writer, self._receiver, self._listener = writer.entry, receiver, listener
        self._worker_id = writer.entry.facts.worker_id
        call = writer.prefill(request, timeout_s)
        self._task = asyncio.create_task(self._follow(call))
        self._task.add_done_callback(lambda _: call.cancel())

    def cancel(self) -> None:
        self._task.cancel()

    async def _follow(self, call: PrefillResponses) -> None:
        """From the worker's answers to its end."""
        is_over = False
        try:
            async for response in call:
                is_over |= self._report(response)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                log.info("%s: %s", self._worker_id, error.details())
                self._listener.on_lease_refused()
            elif not is_over:
                message = f"{self._worker_id}: {error.code().name}: {error.details()}"
                failure, field = failure_of_call(error, self._writer), from_rpc_error(error).field
                self._fail(failure, message, field)
            return
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            if not is_over:
                self._fail(*has_left(self._writer))
            return
        if not is_over:
            self._fail(Failure.PREFILL_FAILED, f"{self._worker_id} ended its answer early")

    def _report(self, response: worker_pb2.PrefillResponse) -> bool:
        """True when nothing more has to come."""
        match response.WhichOneof("event"):
            case "first_token":
                self._listener.on_first_token(response.first_token)
                return bool(response.first_token.finished)
            case "handoff_done":
                self._listener.on_handed_off(response.handoff_done)
                return True
            case "handoff_failed":
                failed = response.handoff_failed
                worker = self._receiver if failed.reason == "PEER_LOST" else self._writer
                message = f"{self._worker_id}: {failed.reason}: {failed.message}"
                self._listener.on_prefill_failed(
                    Failed(failure_of_handoff(failed), worker, message)
                )
                return True
        return False

    def _fail(self, failure: Failure, message: str, field: str | None = None) -> None:
        self._listener.on_prefill_failed(Failed(failure, self._writer, message, field=field))


def has_left(worker: WorkerEntry) -> tuple[Failure, str]:
    """Of a prefill worker that has left the fleet."""
    return loss_of(worker, Failure.PREFILL_FAILED), f"{worker.facts.worker_id} has left the fleet"
