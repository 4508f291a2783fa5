"""What clients may ask, whichever door they come through: generate, abort, tokenize, explain.

gRPC and HTTP turn what they receive into a `GenerateRequest` and hand it to `Api`. So every
check exists once, and one line before the tokenizer serves both.

A client that goes away: a request that its client named (`request_id` set) runs on for
`resume_window_s`, so that the client can come back for it. `abort` ends it at once, even while it
is only being tokenized. A request that the router named is aborted at once, at every hop.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.config.router import TenantLimits
from baton.errors import BatonError
from baton.finish_reason import FinishReason
from baton.v1 import router_pb2
from kv_transfer.block_hash import TokenIds
from router.door.api.tokenizer_line import PendingRequests, TokenizerLine
from router.door.connections.credentials import Callers
from router.fleet.worker_facts import NO_BOUND
from router.placement.placement import Placement
from router.report.ended_request import EndedRequest, trace_id
from router.request.constraint import is_constrained
from router.request.output import Event, Finished, OutputReader, Timings
from router.request.request_run import RequestRun
from router.request.run_parts import Arrival
from router.request.validate import (
    ParsedRequest,
    Prompted,
    RequestLimits,
    check_names,
    check_tokenize_names,
    encode_prompt,
    parse_generate,
)
from router.text.answer import AnswerReader
from router.units.router import Router
from router.units.units import Units

T = TypeVar("T")

MAX_CANDIDATES = 100
# Of a request: below these a thread would cost more than the reading, which holds up all others.
IDS_AT_ONCE_BYTES, TEXT_AT_ONCE_BYTES = 16_384, 4096
CONSTRAINT_BYTES = 64 << 10
"""What checking a constraint counts as in the tokenizer's line: a short one may take long."""
_PIECE = 32_768  # ids


def pieces(ids: TokenIds) -> Iterator[list[int]]:
    """In steps that do not hold up the loop from a thread."""
    return (ids[at : at + _PIECE].tolist() for at in range(0, len(ids), _PIECE))


@dataclass(frozen=True)
class Opened:
    """A request that runs, for one client."""

    router: Router
    run: RequestRun
    reader: OutputReader
    parsed: ParsedRequest
    """As this client sent it: of a run that has ended the prompt is dropped."""

    async def take(self) -> list[Event]:
        """What is new, at least one event; empty after the end. Raises the BatonError that the
        request ended with."""
        return await self.reader.take()

    def leave(self) -> None:
        """Its client has gone, with or without having seen the end."""
        self.router.leave(self.run, self.reader)

    def answer_reader(self) -> AnswerReader | None:
        """None: the answer is all that the model writes."""
        parsed, model = self.parsed, self.router.text
        if not parsed.is_chat:
            return None
        key = f"{self.run.arrival.request_id}/{parsed.body_digest.hex()}"
        must = parsed.constraint is not None and parsed.constraint.field == "chat.tool_choice"
        made = AnswerReader(model, parsed.token_ids[-64:].tolist(), parsed.tool_names, key, must)
        return None if made.is_plain else made


@dataclass(frozen=True)
class Ended:
    """A request that was aborted before its router knew it."""

    e2e_s: float

    @property
    def event(self) -> Finished:
        return Finished(FinishReason.ABORTED, 0, 0, 0, Timings(e2e_s=self.e2e_s))


class Api:
    """Own the line before the tokenizer and the requests that arrive. Raises BatonErrors."""

    def __init__(self, units: Units, callers: Callers | None = None) -> None:
        """`callers` None: everyone may call, in any tenant's name."""
        self.units, self.callers = units, callers
        self.tokenizer = TokenizerLine(units.config.admission)
        self.pending = PendingRequests()
        self._of_names = RequestLimits(NO_BOUND, model_names=units.model_names)

    def close(self) -> None:
        self.tokenizer.close()

    async def off_loop(self, work: Callable[[], T], tenant: str | None, num_bytes: int) -> T:
        """Do what a large request takes in the tokenizer's line, and on its thread."""
        timeout_s = self.units.config.timeouts.default_s
        return await self.tokenizer.run(work, tenant or "", num_bytes, timeout_s)

    def limits_of(self, tenant: str) -> TenantLimits:
        return self.callers.limits_of(tenant) if self.callers else self.units.config.limits

    # --- Generate ------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def opened(
        self, request: router_pb2.GenerateRequest, drawn_id: str = ""
    ) -> AsyncIterator[Opened | Ended]:
        """Run the request, or attach to it where it runs; leave it at the end.

        `drawn_id`: what the door calls a request that its client did not name.
        """
        opened = await self.open(request, drawn_id)
        try:
            yield opened
        finally:
            if isinstance(opened, Opened):
                opened.leave()

    async def open(self, request: router_pb2.GenerateRequest, drawn_id: str = "") -> Opened | Ended:
        """As `opened`; the caller must `leave`."""
        arrived_s = self.units.clock.now_s()
        opened = await self._open(request, drawn_id or uuid.uuid4().hex, arrived_s)
        return opened or Ended(self.units.clock.now_s() - arrived_s)

    async def _open(
        self, request: router_pb2.GenerateRequest, drawn_id: str, arrived_s: float
    ) -> Opened | None:
        """None: aborted before the router knew it. Only a request that its client named can be.

        A request that comes no further leaves its line in the log here.
        """
        outcome, opened = FinishReason.ABORTED.value, None
        arriving: Coroutine[Any, Any, tuple[Router, Arrival] | None]
        arriving = self._arrival(request, request.request_id or drawn_id, arrived_s)
        if request.request_id:
            arriving = self.pending.run((request.tenant, request.request_id), arriving)
        try:
            arrived = await arriving
            if arrived is not None:
                router, arrival = arrived
                opened = Opened(router, *router.open(arrival), arrival.parsed)
        except BatonError as error:
            outcome = error.reason
            raise
        finally:
            if opened is None:
                self.units.metrics.refused(request.tenant, outcome)
                e2e_s = self.units.clock.now_s() - arrived_s
                EndedRequest(
                    request.request_id or drawn_id,
                    request.tenant,
                    outcome,
                    e2e_s,
                    request.session_id,
                    trace_id(request.traceparent),
                ).write_line()
        return opened

    async def _arrival(
        self, request: router_pb2.GenerateRequest, request_id: str, arrived_s: float
    ) -> tuple[Router, Arrival]:
        check_names(request, self._of_names)  # before it waits anywhere
        router = await self.units.router_for(request, request_id)
        started_s = time.perf_counter()
        parsed = await self._read(router, request)
        arrival = Arrival(
            request_id=request_id,
            parsed=parsed,
            traceparent=request.traceparent,
            arrived_s=arrived_s,
            tokenize_s=time.perf_counter() - started_s,
        )
        return router, arrival

    async def _read(self, router: Router, request: router_pb2.GenerateRequest) -> ParsedRequest:
        model = router.text
        limits = router.request_limits(self.limits_of(request.tenant))
        has_ids = request.HasField("token_ids")
        is_small = request.ByteSize() <= (IDS_AT_ONCE_BYTES if has_ids else TEXT_AT_ONCE_BYTES)
        # A template and a grammar are programs: no length says what they cost.
        is_program = request.HasField("chat") or is_constrained(request)
        if is_small and not is_program:
            return parse_generate(request, model, limits)
        named_s = request.timeout_ms / 1e3 if request.HasField("timeout_ms") else None
        return await self.tokenizer.run(
            lambda: parse_generate(request, model, limits),
            request.tenant,
            request.ByteSize() + (CONSTRAINT_BYTES if is_constrained(request) else 0),
            router.config.timeouts.of_request(named_s),
        )

    # --- the rest ------------------------------------------------------------------------------

    async def abort(self, tenant: str, request_id: str) -> None:
        """End a request, wherever it is. Raises NotFoundError."""
        if self.pending.abort((tenant, request_id)):
            self.units.abort_everywhere(tenant, request_id)
        else:
            await self.units.abort(tenant, request_id)

    async def tokenize(self, request: Prompted, answer: Callable[[Router, TokenIds], T]) -> T:
        """What `answer`, which is called off the loop, makes of the ids: there may be millions."""
        check_tokenize_names(request, self._of_names)
        router = await self.units.main_router()
        model, limits = router.text, router.request_limits()
        return await self.off_loop(
            lambda: answer(router, encode_prompt(request, model, limits)),
            request.tenant,
            request.ByteSize(),
        )

    async def explain(self, request: router_pb2.GenerateRequest) -> tuple[Router, list[Placement]]:
        """Where a request would go, cheapest first. Books nothing."""
        check_names(request, self._of_names)
        router = await self.units.router_for(request, request.request_id)
        parsed = await self._read(router, request)
        return router, router.candidates(parsed, MAX_CANDIDATES)
