"""A whole RouterService over real gRPC whose model counts: for tests of clients and commands.

Its tokens follow from prompt, seed and index alone. Requests live in a `Book` that several routers
share, as workers keep them for the next router when one dies.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton import status
from baton.config.internal import InternalConfig
from baton.control.calls import _KEY, _sealing
from baton.errors import BatonError, NotFoundError
from baton.grpc_options import accepts_pings
from baton.identity.identity import recorded
from baton.v1 import (
    common_pb2,
    control_pb2,
    control_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    worker_pb2,
)
from tests.identities import OPERATOR

WORDS = ["the ", "fox ", "sang ", "to ", "a ", "cold ", "moon ", "and ", "slept ", "wéll "]


def word(seed: int, index: int) -> int:
    return (seed * 7919 + index * index * 31 + index) % len(WORDS)


def answer(seed: int, num_tokens: int) -> str:
    return "".join(WORDS[word(seed, index)] for index in range(num_tokens))


@contextlib.contextmanager
def silent_address() -> Iterator[str]:
    """Accepts connections and never answers."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield f"127.0.0.1:{sock.getsockname()[1]}"


def cost_terms(**took_ms: float) -> list[router_pb2.CostTerm]:
    return [router_pb2.CostTerm(name=name, ms=ms) for name, ms in took_ms.items()]


@dataclass
class Book:
    """What the fleet knows of requests: seeds survive their router."""

    seeds: dict[str, int] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    requests: list[router_pb2.GenerateRequest] = field(default_factory=list)
    drawn: Iterator[int] = field(default_factory=lambda: itertools.count(100))


class SmallRouter(router_pb2_grpc.RouterServiceServicer):
    """`die_at`: this router is gone once that many tokens of a request are out; `fail` answers
    every request; `hold`: answers stay unfinished until it is set; `skip`: a token that is never
    reported; `aborts_its_own_only`: what it did not begin is NOT_FOUND."""

    def __init__(
        self,
        book: Book,
        *,
        port: int = 0,
        die_at: int | None = None,
        fail: BatonError | None = None,
        hold: threading.Event | None = None,
        skip: int | None = None,
        aborts_its_own_only: bool = False,
    ) -> None:
        self._skip, self._aborts_its_own_only = skip, aborts_its_own_only
        self._begun: set[str] = set()
        self.aborted: list[str] = []
        self._book, self._die_at, self._hold = book, die_at, hold
        self.fail = fail
        self._server = grpc.server(ThreadPoolExecutor(8), options=(("grpc.so_reuseport", 0),))
        router_pb2_grpc.add_RouterServiceServicer_to_server(self, self._server)  # type: ignore
        control_pb2_grpc.add_FleetServiceServicer_to_server(self, self._server)  # type: ignore
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        self._server.start()

    def stop(self) -> None:
        assert self._server.stop(None).wait(10), "an answer did not end when its call did"

    def Generate(  # noqa: N802
        self, request: router_pb2.GenerateRequest, context: Any
    ) -> Iterator[router_pb2.GenerateResponse]:
        self._book.requests.append(request)
        self._begun.add(request.request_id)
        self._refuse(context)
        seed = self._seed(request)
        workers = {"prefill_worker": "prefill-0", "decode_worker": "decode-0"}
        yield router_pb2.GenerateResponse(
            routed=router_pb2.Routed(
                request_id=request.request_id, seed=seed, num_prompt_tokens=212, **workers
            )
        )
        yield router_pb2.GenerateResponse(prefilled=router_pb2.Prefilled(ttft_ms=12.5))
        yield router_pb2.GenerateResponse(
            handed_off=router_pb2.HandedOff(kv_bytes=2_000_000, put_ms=0.5, exposed_ms=1.0)
        )
        num_tokens = request.sampling.max_tokens or 6
        for index in range(request.resume_from_index, num_tokens):
            if index == self._die_at:
                self._die(context)
                return
            if index == self._skip:
                continue
            token = word(seed, index)
            yield router_pb2.GenerateResponse(
                tokens=router_pb2.Tokens(index=index, ids=[token], text=WORDS[token])
            )
        if self._hold is not None:
            assert self._hold.wait(30), "the answer was held for ever"
        usage = router_pb2.Usage(
            num_prompt_tokens=212, num_output_tokens=num_tokens, num_cached_tokens=192
        )
        timings = router_pb2.Timings(ttft_ms=12.5, itl_ms=5.0, tpot_ms=20.0)
        reason = common_pb2.FINISH_REASON_LENGTH
        finished = router_pb2.Finished(reason=reason, usage=usage, timings=timings)
        yield router_pb2.GenerateResponse(finished=finished)

    def _die(self, context: Any) -> None:
        """Have the server gone before this answer is over: its client sees a lost connection."""
        is_cut_off = threading.Event()
        if context.add_callback(is_cut_off.set):
            threading.Thread(target=self._server.stop, args=(None,)).start()
            assert is_cut_off.wait(10), "the server did not end its calls when it was stopped"

    def _refuse(self, context: Any) -> None:
        if self.fail is not None:
            _end(context, self.fail)

    def _seed(self, request: router_pb2.GenerateRequest) -> int:
        known = self._book.seeds.get(request.request_id)
        if known is None:
            known = request.seed if request.HasField("seed") else next(self._book.drawn)
            self._book.seeds[request.request_id] = known
        return known

    def Abort(self, request: router_pb2.AbortRequest, context: Any) -> router_pb2.AbortResponse:  # noqa: N802
        self._refuse(context)
        if self._aborts_its_own_only and request.request_id not in self._begun:
            _end(context, NotFoundError("no such request here"))
        self.aborted.append(request.request_id)
        self._book.aborted.append(request.request_id)
        return router_pb2.AbortResponse()

    def ListModels(self, request: Any, context: Any) -> router_pb2.ListModelsResponse:  # noqa: N802
        self._refuse(context)
        model = router_pb2.Model(name="demo", max_model_len=512, vocab_size=len(WORDS))
        return router_pb2.ListModelsResponse(models=[model])

    def Tokenize(  # noqa: N802
        self, request: router_pb2.TokenizeRequest, context: Any
    ) -> router_pb2.TokenizeResponse:
        self._refuse(context)
        ids = [WORDS.index(f"{text} ") for text in request.text.split()]
        return router_pb2.TokenizeResponse(ids=ids)

    def ExplainRoute(self, request: Any, context: Any) -> router_pb2.ExplainRouteResponse:  # noqa: N802
        self._refuse(context)
        candidates = [
            router_pb2.RouteCandidate(
                prefill_worker="prefill-0",
                decode_worker="decode-0",
                cost_ms=14.2,
                terms=cost_terms(prefill=12.0, transfer=0.7, decode=1.5),
                num_cached_tokens_prefill=192,
            ),
            router_pb2.RouteCandidate(
                decode_worker="decode-0", cost_ms=1400, terms=cost_terms(prefill=1400)
            ),
        ]
        return router_pb2.ExplainRouteResponse(candidates=candidates, unit="a/0123")

    def WatchFleet(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        self._refuse(context)
        yield control_pb2.FleetServiceWatchFleetResponse(fleet=SmallControl().fleet())


def _end(context: Any, error: BatonError) -> None:
    context.set_trailing_metadata(status.status_metadata(error))
    context.abort(status.status_code(error), error.message)


class SignsAnswers(grpc.ServerInterceptor):
    """Of signed calls, as a control service with keys does; it asks nobody who he is."""

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler, said = continuation(details), dict(details.invocation_metadata).get(_KEY)
        if said is None:
            return handler
        assert OPERATOR.keys is not None
        write, sealed = handler.response_serializer, _sealing(OPERATOR.keys, said[8:24])
        return handler._replace(response_serializer=lambda message: sealed(write(message)))


class SmallControl(control_pb2_grpc.ControlServiceServicer):
    """A registry with one decode pool that grows at once, and drops drained workers. `failing`:
    why no more than the first worker ever starts; `units`: what it answers to WatchUnits."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.units = [control_pb2.Unit(share=1.0)]
        self._replicas = 1
        self._drained: set[str] = set()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def serve(self) -> Iterator[str]:
        """Yield its address."""
        signs: Any = [SignsAnswers()]
        server = grpc.server(ThreadPoolExecutor(4), options=accepts_pings(), interceptors=signs)
        control_pb2_grpc.add_ControlServiceServicer_to_server(self, server)  # type: ignore
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            with recorded(f"127.0.0.1:{port}", InternalConfig("off")):
                yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()

    def fleet(self) -> control_pb2.WatchFleetResponse:
        num_started = min(1, self._replicas) if self.failing else self._replicas
        names = [f"decode-{index}" for index in range(num_started)]
        workers = [self._worker(name, 10000 + index) for index, name in enumerate(names)]
        pool = control_pb2.PoolStatus(
            name="decode",
            role=common_pb2.WORKER_ROLE_DECODE,
            desired_replicas=self._replicas,
            live_replicas=len([name for name in names if name not in self._drained]),
            last_error=self.failing,
            num_failed_starts=2 if self.failing else 0,
        )
        return control_pb2.WatchFleetResponse(workers=workers, pools=[pool])

    def _worker(self, name: str, port: int) -> control_pb2.FleetWorker:
        gone = name in self._drained
        return control_pb2.FleetWorker(
            info=control_pb2.WorkerInfo(
                ref=common_pb2.WorkerRef(worker_id=name, incarnation=1),
                pool="decode",
                role=common_pb2.WORKER_ROLE_DECODE,
                address=f"127.0.0.1:{port}",
            ),
            state=control_pb2.WORKER_STATE_GONE if gone else control_pb2.WORKER_STATE_LIVE,
            load=worker_pb2.WorkerLoad(
                num_running=3,
                num_blocks=1024,
                num_free_blocks=512,
                prefill_tokens_per_s=8123,
                decode_step_s=0.0051,
                handoff_bytes_per_s=4.2e9,
            ),
        )

    def WatchFleet(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        while context.is_active():
            with self._changed:
                yield self.fleet()
                self._changed.wait(0.2)

    def WatchUnits(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        yield control_pb2.WatchUnitsResponse(units=self.units)

    def SetReplicas(  # noqa: N802
        self, request: control_pb2.SetReplicasRequest, context: Any
    ) -> control_pb2.SetReplicasResponse:
        with self._changed:
            previous, self._replicas = self._replicas, request.replicas
            self._changed.notify_all()
        return control_pb2.SetReplicasResponse(previous_replicas=previous)

    def SetRolePlan(self, request: Any, context: Any) -> control_pb2.SetRolePlanResponse:  # noqa: N802
        return control_pb2.SetRolePlanResponse()

    def Drain(  # noqa: N802
        self, request: control_pb2.ControlServiceDrainRequest, context: Any
    ) -> control_pb2.ControlServiceDrainResponse:
        with self._changed:
            self._drained.add(request.worker_id)
            self._changed.notify_all()
        return control_pb2.ControlServiceDrainResponse()
