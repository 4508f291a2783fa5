"""What clients may ask, whichever door they come through: generate, abort, tokenize, explain.

gRPC and HTTP turn what they receive into a `GenerateRequest` and hand it to `Api`. So every
check exists once, and one line before the tokenizer serves both.

A client that goes away: a request that its client named (`request_id` set) runs on for
`resume_window_s`, so that the client can come back for it. `abort` ends it at once, even while it
is only being tokenized. A request that the router named is aborted at once, at every hop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from baton.config.router import TenantLimits
from baton.errors import BatonError
from baton.finish_reason import FinishReason
from baton.v1 import router_pb2
from kv_transfer.block_hash import TokenIds
from router.door.api.tokenizer_line import PendingRequests, TokenizerLine
from router.door.connections.credentials import Callers
from router.placement.placement import Placement
from router.report.ended_request import EndedRequest, trace_id
from router.request.client_request import ClientRequest, check_request
from router.request.constraint import is_constrained
from router.request.output import OutputReader
from router.request.request_run import RequestRun
from router.request.validate import (
    ParsedRequest,
    Prompted,
    check_tokenize,
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
    """Yield ids in lists so short that a thread that makes them does not hold up the loop."""
    return (ids[at : at + _PIECE].tolist() for at in range(0, len(ids), _PIECE))


@dataclass(frozen=True)
class Opened:
    """A request that runs, for one client."""

    router: Router
    run: RequestRun
    reader: OutputReader
    parsed: ParsedRequest
    """As this client sent it: of a run that has ended the prompt is dropped."""

    def leave(self) -> None:
        """Let go of it: its client has gone, with or without having seen the end."""
        self.router.leave(self.run, self.reader)

    def answer_reader(self) -> AnswerReader | None:
        """Return what tells thoughts, text and calls apart; None: all of the answer is text."""
        parsed, model = self.parsed, self.router.text
        if not parsed.is_chat:
            return None
        key = f"{parsed.head.request_id}/{parsed.body_digest.hex()}"
        must = parsed.constraint is not None and parsed.constraint.field == "chat.tool_choice"
        made = AnswerReader(model, parsed.token_ids[-64:].tolist(), parsed.tool_names, key, must)
        return None if made.is_plain else made


class Api:
    """Own the line before the tokenizer and the requests that arrive. Raises BatonErrors."""

    def __init__(self, units: Units, callers: Callers | None = None) -> None:
        """`callers` None: everyone may call, in any tenant's name."""
        self.units, self.callers = units, callers
        self.tokenizer = TokenizerLine(units.config.admission)
        self.pending = PendingRequests()

    def close(self) -> None:
        self.tokenizer.close()

    async def off_loop(self, work: Callable[[], T], tenant: str | None, num_bytes: int) -> T:
        """Run work for a large request on the tokenizer's thread, after a turn in its line."""
        timeout_s = self.units.config.timeouts.default_s
        return await self.tokenizer.run(work, tenant or "", num_bytes, timeout_s)

    def limits_of(self, tenant: str) -> TenantLimits:
        return self.callers.limits_of(tenant) if self.callers else self.units.config.limits

    # --- Generate ------------------------------------------------------------------------------

    async def open(self, message: router_pb2.GenerateRequest, drawn_id: str) -> Opened | None:
        """Run the request, or attach to it where it runs; the caller must `leave`. None: it was
        aborted before its router knew it, as only a request that its client named can be.

        `drawn_id`: what the door calls a request that its client did not name. A request that comes
        no further leaves its line in the log here.
        """
        arrived_s, outcome = self.units.clock.now_s(), FinishReason.ABORTED.value
        opened: Opened | None = None
        try:
            request = check_request(message, self.units.model_names, drawn_id, arrived_s)
            parsing, is_named = self._parsed(request), request.head.is_named
            pending = self.pending.run(request.head.key, parsing) if is_named else parsing
            if (arrived := await pending) is not None:
                router, parsed, tokenize_s = arrived
                opened = Opened(router, *router.open(parsed, tokenize_s), parsed)
        except BatonError as error:
            outcome = error.reason
            raise
        finally:
            if opened is None:
                self.units.metrics.refused(message.tenant, outcome)
                EndedRequest(
                    message.request_id or drawn_id,
                    message.tenant,
                    outcome,
                    self.units.clock.now_s() - arrived_s,
                    message.session_id,
                    trace_id(message.traceparent),
                ).write_line()
        return opened

    async def _parsed(self, request: ClientRequest) -> tuple[Router, ParsedRequest, float]:
        """Return the request's router, what it asks for, and the seconds that reading it took."""
        router = await self.units.router_for(request)
        started_s = time.perf_counter()
        model, head, message = router.text, request.head, request.message
        limits = router.request_limits(self.limits_of(head.tenant))
        has_ids = message.HasField("token_ids")
        is_small = request.num_bytes <= (IDS_AT_ONCE_BYTES if has_ids else TEXT_AT_ONCE_BYTES)
        has_constraint = is_constrained(message)
        # A template and a grammar are programs: no length says what they cost.
        if is_small and not has_constraint and not message.HasField("chat"):
            parsed = parse_generate(request, model, limits)
        else:
            parsed = await self.tokenizer.run(
                lambda: parse_generate(request, model, limits),
                head.tenant,
                request.num_bytes + (CONSTRAINT_BYTES if has_constraint else 0),
                router.config.timeouts.of_request(head.timeout_s),
            )
        return router, parsed, time.perf_counter() - started_s

    # --- the rest ------------------------------------------------------------------------------

    async def abort(self, tenant: str, request_id: str) -> None:
        """End a request, wherever it is. Raises NotFoundError."""
        if self.pending.abort((tenant, request_id)):
            self.units.abort_everywhere(tenant, request_id)
        else:
            await self.units.abort(tenant, request_id)

    async def tokenize(self, request: Prompted, answer: Callable[[Router, TokenIds], T]) -> T:
        """Return what `answer` makes of the ids. It runs off the loop: there may be millions."""
        check_tokenize(request, self.units.model_names)
        router, num_bytes = await self.units.main_router(), request.ByteSize()
        model, limits = router.text, router.request_limits()
        return await self.off_loop(
            lambda: answer(router, encode_prompt(request, num_bytes, model, limits)),
            request.tenant,
            num_bytes,
        )

    async def explain(self, message: router_pb2.GenerateRequest) -> tuple[Router, list[Placement]]:
        """Return where a request would go, cheapest first. Books nothing."""
        request = check_request(message, self.units.model_names)
        router, parsed, _ = await self._parsed(request)
        return router, router.candidates(parsed, MAX_CANDIDATES)
