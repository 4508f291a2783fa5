"""`RouterService`: the wire's side of the router. Client messages stop here.

A client that goes away: gRPC does not distinguish a cancelled call from a lost connection. A
request that its client named (`request_id` set) runs on for `resume_window_s`, so that the client
can come back for it. `Abort` ends it at once, even while it is only being tokenized. A request that
the router named is aborted at once, at every hop.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc.aio

from baton.errors import BatonError, NotFoundError
from baton.status import abort
from baton.v1 import common_pb2, router_pb2, router_pb2_grpc
from router.door.arriving import Arriving, Tokenizing
from router.door.door import Door
from router.fleet.worker_facts import NO_BOUND
from router.placement.placement import Placement
from router.report.request_line import of_refused
from router.request.output import (
    Event,
    Finished,
    FinishReason,
    OutputReader,
    Timings,
    TokenRun,
)
from router.request.request_run import RequestRun
from router.request.run_parts import Arrival
from router.request.validate import (
    ParsedRequest,
    RequestLimits,
    check_names,
    check_tokenize_names,
    encode_prompt,
    parse_generate,
)
from router.router import Router

Context = grpc.aio.ServicerContext[Any, Any]

MAX_CANDIDATES = 100
READ_AT_ONCE_BYTES = 16_384  # of a request with token ids: a thread would cost more than it
_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: common_pb2.FINISH_REASON_ABORTED,
}


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """Takes requests in and streams their output; text is tokenized on threads of its own."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self.tokenizing = Tokenizing(door.config)
        self.arriving = Arriving()
        self._of_names = RequestLimits(NO_BOUND, model_names=(door.model_name,))

    def close(self) -> None:
        self.tokenizing.close()

    # --- Generate ------------------------------------------------------------------------------

    async def Generate(  # noqa: N802
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        arrived_s = self._door.clock.now_s()
        try:
            opened = await self._open(request, arrived_s)
            if opened is None:
                yield _response(_aborted(self._door.clock.now_s() - arrived_s))
                return
            router, run, reader = opened
            try:
                while events := await reader.take():
                    for event in events:
                        yield _response(event)
            finally:
                router.leave(run, reader)
        except BatonError as error:
            await abort(context, error)

    async def _open(
        self, request: router_pb2.GenerateRequest, arrived_s: float
    ) -> tuple[Router, RequestRun, OutputReader] | None:
        """None: aborted before the router knew it. Only a request that its client named can be.

        A request that comes no further leaves its line in the log here.
        """
        request_id = request.request_id or uuid.uuid4().hex
        outcome, opened = FinishReason.ABORTED.value, None
        arriving: Coroutine[Any, Any, tuple[Router, Arrival] | None]
        arriving = self._arrival(request, request_id, arrived_s)
        if request.request_id:
            arriving = self.arriving.run((request.tenant, request_id), arriving)
        try:
            arrived = await arriving
            if arrived is not None:
                router, arrival = arrived
                opened = (router, *router.open(arrival))
        except BatonError as error:
            outcome = error.reason
            raise
        finally:
            if opened is None:
                of_refused(request, outcome, self._door.clock.now_s() - arrived_s).write()
        return opened

    async def _arrival(
        self, request: router_pb2.GenerateRequest, request_id: str, arrived_s: float
    ) -> tuple[Router, Arrival]:
        check_names(request, self._of_names)  # before it waits anywhere
        router = await self._door.router_for(request, request_id)
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
        model, limits = router.text, router.request_limits()
        if request.HasField("token_ids") and request.ByteSize() <= READ_AT_ONCE_BYTES:
            return parse_generate(request, model, limits)
        named_s = request.timeout_ms / 1e3 if request.HasField("timeout_ms") else None
        return await self.tokenizing.run(
            lambda: parse_generate(request, model, limits),
            request.tenant,
            request.ByteSize(),
            router.config.timeout_s(named_s),
        )

    # --- the rest ------------------------------------------------------------------------------

    async def Abort(  # noqa: N802
        self, request: router_pb2.AbortRequest, context: Context
    ) -> router_pb2.AbortResponse:
        if self.arriving.abort((request.tenant, request.request_id)):
            self._door.abort_everywhere(request.tenant, request.request_id)
            return router_pb2.AbortResponse()
        try:
            self._door.abort(request.tenant, request.request_id)
        except NotFoundError as error:
            await abort(context, error)
        return router_pb2.AbortResponse()

    async def ListModels(  # noqa: N802
        self, request: router_pb2.ListModelsRequest, context: Context
    ) -> router_pb2.ListModelsResponse:
        router = await self._main_router(context)
        model = router_pb2.Model(
            name=router.model.name,
            max_model_len=router.max_model_len() or 0,
            vocab_size=router.text.vocab_size,
        )
        return router_pb2.ListModelsResponse(models=[model])

    async def Tokenize(  # noqa: N802
        self, request: router_pb2.TokenizeRequest, context: Context
    ) -> router_pb2.TokenizeResponse:
        try:
            check_tokenize_names(request, self._of_names)
            router = await self._door.main_router()
            model, limits = router.text, router.request_limits()
            ids = await self.tokenizing.run(
                lambda: encode_prompt(request, model, limits),
                request.tenant,
                request.ByteSize(),
                self._door.config.default_timeout_s,
            )
        except BatonError as error:
            await abort(context, error)
        return router_pb2.TokenizeResponse(ids=ids.tolist())

    async def ExplainRoute(  # noqa: N802
        self, request: router_pb2.ExplainRouteRequest, context: Context
    ) -> router_pb2.ExplainRouteResponse:
        try:
            check_names(request.request, self._of_names)
            router = await self._door.router_for(request.request, request.request.request_id)
            parsed = await self._read(router, request.request)
        except BatonError as error:
            await abort(context, error)
        candidates = [_candidate(one) for one in router.candidates(parsed, MAX_CANDIDATES)]
        return router_pb2.ExplainRouteResponse(candidates=candidates, unit=router.model.unit)

    async def WatchFleet(  # noqa: N802
        self, request: router_pb2.RouterServiceWatchFleetRequest, context: Context
    ) -> AsyncIterator[router_pb2.RouterServiceWatchFleetResponse]:
        """Of the unit that gets most requests; ends with its router."""
        router = await self._main_router(context)
        seen = None
        while (seen := await router.watch.next_after(seen)) is not None:
            yield router_pb2.RouterServiceWatchFleetResponse(fleet=seen)

    async def _main_router(self, context: Context) -> Router:
        try:
            return await self._door.main_router()
        except BatonError as error:
            await abort(context, error)


# --- values to messages ---------------------------------------------------------------------------


def _response(event: Event) -> router_pb2.GenerateResponse:
    match event:
        case TokenRun():
            tokens = router_pb2.Tokens(
                index=event.index, ids=event.ids, text=event.text, logprobs=event.logprobs
            )
            return router_pb2.GenerateResponse(tokens=tokens)
        case Finished():
            return router_pb2.GenerateResponse(finished=_finished(event))
        case router_pb2.Routed():
            return router_pb2.GenerateResponse(routed=event)
        case router_pb2.Prefilled():
            return router_pb2.GenerateResponse(prefilled=event)
        case router_pb2.HandedOff():
            return router_pb2.GenerateResponse(handed_off=event)
        case router_pb2.Migrated():
            return router_pb2.GenerateResponse(migrated=event)


def _aborted(e2e_s: float) -> Finished:
    """The end of a request whose prompt nobody has read."""
    return Finished(FinishReason.ABORTED, 0, 0, 0, Timings(e2e_s=e2e_s))


def _finished(event: Finished) -> router_pb2.Finished:
    timings = {name.removesuffix("_s") + "_ms": s * 1e3 for name, s in vars(event.timings).items()}
    return router_pb2.Finished(
        reason=_REASONS[event.reason],
        usage=router_pb2.Usage(
            num_prompt_tokens=event.num_prompt_tokens,
            num_output_tokens=event.num_output_tokens,
            num_cached_tokens=event.num_cached_tokens,
        ),
        timings=router_pb2.Timings(**timings),
        stop=event.stop,
    )


def _candidate(placement: Placement) -> router_pb2.RouteCandidate:
    return router_pb2.RouteCandidate(
        prefill_worker=placement.prefill_worker,
        decode_worker=placement.decode_worker,
        cost_ms=placement.cost_s * 1e3,
        queue_ms=placement.queue_s * 1e3,
        prefill_ms=placement.prefill_s * 1e3,
        transfer_ms=placement.transfer_s * 1e3,
        decode_ms=placement.decode_s * 1e3,
        num_cached_tokens_prefill=placement.num_cached_tokens_prefill,
        num_cached_tokens_decode=placement.num_cached_tokens_decode,
    )
