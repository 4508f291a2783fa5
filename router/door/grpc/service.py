"""`RouterService` and `FleetService`: gRPC's face of `Api`. Client messages stop here.

gRPC does not distinguish a cancelled call from a lost connection; `api` says what follows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import chain

from baton.finish_reason import FinishReason
from baton.v1 import control_pb2, control_pb2_grpc, router_pb2, router_pb2_grpc
from baton.wire import finish_reason_on_wire
from router.door.api.api import Api, Opened, pieces
from router.door.grpc.call import Call, Feed
from router.placement.placement import Placement
from router.request.client_request import REQUEST_ID
from router.request.output import Event, Finished, TokenRun
from router.text.answer import AnswerReader, Said, Thought


class RouterService(router_pb2_grpc.RouterServiceServicer, control_pb2_grpc.FleetServiceServicer):
    """Takes requests in and streams their output. A BatonError ends its call."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: router_pb2.GenerateRequest, context: Call
    ) -> Feed | router_pb2.GenerateResponse:
        if REQUEST_ID.fullmatch(request.request_id):
            context.request_id = request.request_id
        request.traceparent = request.traceparent or context.traceparent[:128]
        opened = await self._api.open(request, context.request_id)
        if opened is None:
            finished = router_pb2.Finished(reason=finish_reason_on_wire(FinishReason.ABORTED))
            return router_pb2.GenerateResponse(finished=finished)
        return _Output(opened)

    async def Abort(  # type: ignore[override]  # noqa: N802
        self, request: router_pb2.AbortRequest, context: Call
    ) -> router_pb2.AbortResponse:
        await self._api.abort(request.tenant, request.request_id)
        return router_pb2.AbortResponse()

    async def ListModels(  # type: ignore[override]  # noqa: N802
        self, request: router_pb2.ListModelsRequest, context: Call
    ) -> router_pb2.ListModelsResponse:
        router = await self._api.units.main_router()
        model = router_pb2.Model(
            name=router.model.name,
            max_model_len=router.max_model_len() or 0,
            vocab_size=router.text.vocab_size,
        )
        return router_pb2.ListModelsResponse(models=[model])

    async def Tokenize(  # type: ignore[override]  # noqa: N802
        self, request: router_pb2.TokenizeRequest, context: Call
    ) -> router_pb2.TokenizeResponse:
        return await self._api.tokenize(
            request,
            lambda _, ids: router_pb2.TokenizeResponse(ids=chain.from_iterable(pieces(ids))),
        )

    async def ExplainRoute(  # type: ignore[override]  # noqa: N802
        self, request: router_pb2.ExplainRouteRequest, context: Call
    ) -> router_pb2.ExplainRouteResponse:
        router, placements = await self._api.explain(request.request)
        candidates = [_candidate(one) for one in placements]
        return router_pb2.ExplainRouteResponse(candidates=candidates, unit=router.model.unit)

    async def WatchFleet(  # type: ignore[override]  # noqa: N802
        self, request: control_pb2.FleetServiceWatchFleetRequest, context: Call
    ) -> AsyncIterator[control_pb2.FleetServiceWatchFleetResponse]:
        """Show the fleet of the unit that gets most requests, until its router ends."""
        router, callers = await self._api.units.main_router(), self._api.callers
        is_tenant = callers is not None and not callers.is_operator(context.tenant)
        seen = None
        while (seen := await router.watch.next_after(seen)) is not None:
            shown = _for_tenants(seen) if is_tenant else seen
            yield control_pb2.FleetServiceWatchFleetResponse(fleet=shown)


class _Output(Feed):
    """The output of a request, for the client that opened it."""

    def __init__(self, opened: Opened) -> None:
        self._opened, self._reader = opened, opened.reader
        self._answer = opened.answer_reader()

    def follow(self, on_news: Callable[[], None]) -> None:
        self._reader.on_news = on_news

    @property
    def has_more(self) -> bool:
        return self._reader.has_more

    def take(self) -> Sequence[router_pb2.GenerateResponse] | None:
        events = self._reader.take_now()
        if events is None:
            return None
        answer = self._answer
        return list(map(_response, events) if answer is None else self._told_apart(answer, events))

    def leave(self) -> None:
        self._opened.leave()

    def _told_apart(
        self, answer: AnswerReader, events: Sequence[Event]
    ) -> Iterator[router_pb2.GenerateResponse]:
        """Send what tokens say with them: so a client that comes back, and names the first token
        that it has not seen, misses nothing. What is left at the end comes without ids, once."""
        rest: list[Said] = []
        for event in events:
            if isinstance(event, TokenRun | Finished):
                answer.push(self._reader.take_seen())
            if isinstance(event, TokenRun):
                rest += answer.push(event.text)
                if event.ids:
                    yield _tokens(event, rest)
                    rest = []
            elif isinstance(event, Finished):
                if rest := rest + answer.finish():
                    yield _tokens(TokenRun(event.num_output_tokens, (), "", ()), rest)
                yield router_pb2.GenerateResponse(finished=_finished(event, answer.has_called))
            else:
                yield _response(event)


# --- values to messages ---------------------------------------------------------------------------

_TIMES = {
    field.name: field.name.removesuffix("_ms") + "_s"
    for field in router_pb2.Timings.DESCRIPTOR.fields
}


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


def _tokens(run: TokenRun, said: Iterable[Said]) -> router_pb2.GenerateResponse:
    tokens = router_pb2.Tokens(index=run.index, ids=run.ids, logprobs=run.logprobs)
    for each in said:
        if isinstance(each, str):
            tokens.text += each
        elif isinstance(each, Thought):
            tokens.reasoning += each.text
        else:
            named = {"id": each.call_id, "name": each.name or ""}
            tokens.tool_calls.add(index=each.index, arguments=each.arguments, **named)
    return router_pb2.GenerateResponse(tokens=tokens)


def _finished(event: Finished, has_called: bool = False) -> router_pb2.Finished:
    timings = {name: getattr(event.timings, own) * 1e3 for name, own in _TIMES.items()}
    calls = has_called and event.reason is FinishReason.STOP
    reason = FinishReason.TOOL_CALLS if calls else event.reason
    return router_pb2.Finished(
        reason=finish_reason_on_wire(reason),
        usage=router_pb2.Usage(
            num_prompt_tokens=event.num_prompt_tokens,
            num_output_tokens=event.num_output_tokens,
            num_cached_tokens=event.num_cached_tokens,
        ),
        timings=router_pb2.Timings(**timings),
        stop=event.stop,
    )


def _for_tenants(fleet: control_pb2.WatchFleetResponse) -> control_pb2.WatchFleetResponse:
    """Return what serves. Where it runs, and what work all tenants give it, is for operators."""
    shown = control_pb2.WatchFleetResponse(version=fleet.version)
    for worker in fleet.workers:
        info = shown.workers.add(state=worker.state).info
        info.ref.worker_id = worker.info.ref.worker_id
        info.pool, info.role, info.model = worker.info.pool, worker.info.role, worker.info.model
    return shown


def _candidate(placement: Placement) -> router_pb2.RouteCandidate:
    return router_pb2.RouteCandidate(
        prefill_worker=placement.prefill_worker,
        decode_worker=placement.decode_worker,
        cost_ms=placement.cost_s * 1e3,
        terms=[
            router_pb2.CostTerm(name=name, ms=seconds * 1e3)
            for name, seconds in placement.terms_s.items()
        ],
        num_cached_tokens_prefill=placement.num_cached_tokens_prefill,
        num_cached_tokens_decode=placement.num_cached_tokens_decode,
    )
