"""An attempt's call to its prefill worker.

It sends the first token at once and the end of the handoff later. It sends nothing more after a
first token that ends the request.
"""

from __future__ import annotations

import logging
from typing import Protocol

import grpc

from baton.link.frames import LinkError
from baton.status import from_rpc_error
from baton.v1 import worker_pb2
from router.fleet.fleet import WorkerEntry
from router.fleet.worker_link import WorkerLink
from router.request.failure import Failed, Failure, failure_of_call, failure_of_handoff

log = logging.getLogger(__name__)


class PrefillListener(Protocol):
    """Callbacks for the prefill's progress. All run on the event loop, and none may block."""

    def on_first_token(self, first: worker_pb2.FirstToken) -> None: ...
    def on_handed_off(self, done: worker_pb2.HandoffDone) -> None: ...
    def on_prefill_failed(self, failed: Failed) -> None: ...
    def on_lease_refused(self) -> None:
        """The lease is served already, fenced or over: the session reports how it ends."""


class PrefillCall:
    """Own the call. The link's `Caller`."""

    def __init__(
        self,
        writer: WorkerLink,
        receiver: WorkerEntry,
        request: worker_pb2.PrefillRequest,
        listener: PrefillListener,
    ) -> None:
        """`receiver`: the decode worker that the prompt's KV goes to."""
        self._writer, self._receiver, self._listener = writer.entry, receiver, listener
        self._worker_id = writer.entry.facts.worker_id
        self._is_over = False
        self._call = writer.prefill(request, self)

    def cancel(self) -> None:
        self._is_over = True
        if self._call is not None:
            self._call.cancel()

    def on_message(self, response: worker_pb2.PrefillResponse) -> None:
        match response.WhichOneof("event"):
            case "first_token":
                self._is_over |= response.first_token.finished != 0
                self._listener.on_first_token(response.first_token)
            case "handoff_done":
                self._is_over = True
                self._listener.on_handed_off(response.handoff_done)
            case "handoff_failed":
                self._is_over = True
                failed = response.handoff_failed
                worker = self._receiver if failed.reason == "PEER_LOST" else self._writer
                message = f"{self._worker_id}: {failed.reason}: {failed.message}"
                self._listener.on_prefill_failed(
                    Failed(failure_of_handoff(failed), worker, message)
                )

    def on_end(self, error: LinkError | None) -> None:
        if self._is_over:
            return
        if error is None:
            self._fail(Failure.PREFILL_FAILED, f"{self._worker_id} ended its answer early")
        elif error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            log.info("%s: %s", self._worker_id, error.details())
            self._listener.on_lease_refused()
        else:
            told, message = from_rpc_error(error), f"{self._worker_id}: {error}"
            failure = failure_of_call(error, self._writer)
            failed = Failed(failure, self._writer, message, 0.0, told.field, told.message)
            self._listener.on_prefill_failed(failed)

    def _fail(self, failure: Failure, message: str) -> None:
        self._listener.on_prefill_failed(Failed(failure, self._writer, message))
