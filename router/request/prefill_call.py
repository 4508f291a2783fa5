"""An attempt's call to its prefill worker.

It sends the first token at once and the end of the handoff later. It sends nothing more after a
first token that ends the request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc

from baton.clock import Clock
from baton.link.frames import LinkError
from baton.status import from_rpc_error
from baton.v1 import worker_pb2
from router.fleet.fleet import WorkerEntry
from router.fleet.worker_link import WorkerLink
from router.request.failure import HANDOFF_NOT_BEGUN, Failed, Failure, failure_of_call
from router.request.machine import FirstToken, OfPrefill, PrefillFailed, Signal

log = logging.getLogger(__name__)

Feed = Callable[[OfPrefill, object], None]
"""Takes an event with the message that it came with."""


class PrefillCall:
    """Own the call. The link's `Caller`."""

    def __init__(
        self,
        writer: WorkerLink,
        receiver: WorkerEntry,
        request: worker_pb2.PrefillRequest,
        clock: Clock,
        feed: Feed,
    ) -> None:
        """`receiver`: the decode worker that the prompt's KV goes to."""
        self._writer, self._receiver, self._clock, self._feed = writer, receiver, clock, feed
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
                first = response.first_token
                self._is_over |= first.finished != 0
                self._writer.first_token_s = self._clock.now_s()
                self._feed(FirstToken(first.finished != 0), first)
            case "handoff_done":
                self._is_over = True
                self._feed(Signal.HANDED_OFF, response.handoff_done)
            case "handoff_failed":
                self._is_over = True
                failed = response.handoff_failed
                worker = self._receiver if failed.reason == "PEER_LOST" else self._writer.entry
                message = f"{self._worker_id}: {failed.reason}: {failed.message}"
                failure = HANDOFF_NOT_BEGUN.get(failed.reason, Failure.HANDOFF_FAILED)
                self._fail(Failed(failure, worker, message))

    def on_end(self, error: LinkError | None) -> None:
        writer = self._writer.entry
        if self._is_over:
            return
        if error is None:
            message = f"{self._worker_id} ended its answer early"
            self._fail(Failed(Failure.PREFILL_FAILED, writer, message))
        elif error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            log.info("%s: %s", self._worker_id, error.details())
            self._feed(Signal.LEASE_REFUSED, None)
        else:
            told, message = from_rpc_error(error), f"{self._worker_id}: {error}"
            failure = failure_of_call(error, writer)
            self._fail(Failed(failure, writer, message, 0.0, told.field, told.message))

    def _fail(self, failed: Failed) -> None:
        self._feed(PrefillFailed(failed), None)
