"""What a worker reports about itself: to the registry, to Prometheus and to CheckIntegrity.

A worker registers, sends heartbeats, and registers again for ever. A lost registry is rebuilt from
these registrations, so its loss must never disturb a worker. Only a worker with another model than
the registry's ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from baton import status
from baton.control.calls import control_channel, control_stub
from baton.errors import OtherModelError
from baton.grpc_options import DIRECT, sends_pings
from baton.identity.identity import Identity
from baton.pacing import Backoff
from baton.v1 import control_pb2, worker_pb2
from baton.wire import ROLES
from cluster.worker.config import WorkerConfig
from cluster.worker.rank import Rank
from engine.api import EngineCapacity, EngineLoad

log = logging.getLogger(__name__)

# A subchannel pool shared by the process would also share its back-off, which grows to minutes.
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    *sends_pings(5.0),
    *DIRECT,
)


def worker_info(
    config: WorkerConfig, rank: Rank, capacity: EngineCapacity, address: str
) -> control_pb2.WorkerInfo:
    """The registration of a worker that serves at `address`. `rank`: its rank 0."""
    model, pod = rank.model, config.pod
    return control_pb2.WorkerInfo(
        ref=rank.identity.to_proto(),
        pool=config.pool,
        role=ROLES[config.shape.role],
        address=address,
        model=config.cluster.model_name,
        kv_fingerprint=model.kv_fingerprint,
        model_fingerprint=model.model_fingerprint,
        dtype=model.dtype,
        tp_size=rank.identity.tp_size,
        block_size=model.layout.block_size,
        num_blocks=capacity.num_blocks,
        max_model_len=capacity.max_model_len,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        vocab_size=model.vocab_size,
        kv_bytes_per_token=model.layout.token_bytes(),
        max_request_tokens=capacity.max_request_tokens or 0,
        max_held_tokens_per_request=capacity.max_held_tokens or 0,
        pod_name="" if pod is None else pod.name,
        node_name="" if pod is None else pod.node_name,
    )


def load_fields(load: EngineLoad, message: type[Message]) -> dict[str, Any]:
    """Return the engine's figures for which the message has a field of the same name."""
    names = message.DESCRIPTOR.fields_by_name.keys()
    return {name: figure for name, figure in vars(load).items() if name in names}


class Registrar:
    """Keeps one worker registered at one control service.

    `beat` returns each heartbeat, without the registration. `on_drain` is called when the registry
    asks the worker to drain, possibly more than once.
    """

    def __init__(
        self,
        control_address: str,
        info: control_pb2.WorkerInfo,
        beat: Callable[[], control_pb2.RegisterRequest],
        on_drain: Callable[[], None],
        identity: Identity,
        interval_s: float = 0.3,
    ) -> None:
        self._address, self._identity = control_address, identity
        self._info = info
        self._beat = beat
        self._on_drain = on_drain
        self._interval_s = interval_s

    async def run(self) -> None:
        """Stay registered until cancelled. Raises OtherModelError if the registry has another
        model."""
        backoff = Backoff(0.1, 2.0)
        this = asyncio.current_task()
        while True:
            try:
                heard = await self._stay_registered()
            except grpc.aio.AioRpcError as error:
                refusal = status.from_rpc_error(error, self._address)
                if isinstance(refusal, OtherModelError):
                    raise refusal from error
                log.warning(
                    "registry at %s: %s %s", self._address, error.code().name, error.details()
                )
                heard = False
            if this is not None and this.cancelling():
                # The cancellation came while the call failed, and the call's error replaced it.
                raise asyncio.CancelledError
            if heard:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _stay_registered(self) -> bool:
        """Run one stream. True: the registry ended it in order."""
        identity = self._identity
        async with control_channel(grpc.aio, self._address, _CHANNEL_OPTIONS, identity) as channel:
            # A channel that is not connected fails at once; the caller waits before it retries.
            call: Any = control_stub(channel, identity).Register(self._messages())
            async for response in call:
                if response is None:  # it is not signed, as the log says
                    return False
                if response.drain:
                    self._on_drain()
        return True

    async def _messages(self) -> AsyncIterator[control_pb2.RegisterRequest]:
        with contextlib.suppress(asyncio.CancelledError):
            beat = self._beat()
            beat.worker.CopyFrom(self._info)
            while True:
                yield beat
                await asyncio.sleep(self._interval_s)
                beat = self._beat()


_GAUGES = {
    "num_waiting": "Requests waiting for their first step",
    "num_running": "Requests in the running batch",
    "num_reserved": "Requests whose KV is in transfer",
    "num_queued_tokens": "Prompt tokens still to be computed",
    "num_free_blocks": "KV blocks free or evictable",
    "num_blocks": "KV blocks",
    "num_quarantined_blocks": "Quarantined KV blocks: a late writer or reader could touch them",
    "prefill_tokens_per_s": "Measured prefill rate",
    "decode_step_s": "Measured time of a decode step",
    "handoff_bytes_per_s": "Measured bandwidth of this worker's handoffs",
}


class WorkerCollector(Collector):
    """Turns the latest load and progress into metrics with the worker's labels, on a scrape."""

    def __init__(
        self,
        worker_id: str,
        pool: str,
        load: Callable[[], worker_pb2.WorkerLoad],
        progress: Callable[[], control_pb2.StepProgress],
        num_orphans: Callable[[], int],
        num_quarantined_bytes: Callable[[], int],
        num_other_first_tokens: Callable[[], int],
    ) -> None:
        self._labels = (worker_id, pool)
        self._load = load
        self._progress = progress
        self._num_orphans = num_orphans
        self._num_quarantined_bytes = num_quarantined_bytes
        self._num_other_first_tokens = num_other_first_tokens

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        for name, text in _GAUGES.items():
            yield self._gauge(f"worker_{name}", text, getattr(load, name))
        progress = self._progress()
        yield self._gauge("worker_idle_s", "Seconds since the last step ended", progress.idle_s)
        orphans = self._num_orphans()
        yield self._gauge("worker_num_orphans", "Requests whose router is gone", orphans)
        yield self._gauge(
            "kv_quarantined_bytes",
            "Quarantined KV memory of all ranks: a late writer or reader could touch it",
            self._num_quarantined_bytes(),
        )
        yield self._counter("worker_steps", "Engine steps", progress.num_steps)
        text = "Requests that lost their KV to others, and wait again"
        yield self._counter("worker_preemptions", text, load.num_preemptions)
        text, wasted = "Tokens computed again", load.num_recomputed_tokens
        yield self._counter("wasted_tokens", text, wasted, cause="preemption")
        text = "First tokens of which the engine computed another than the prefill worker had sent"
        yield self._counter("worker_other_first_tokens", text, self._num_other_first_tokens())

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"baton_{name}", text, labels=("worker", "pool"))
        gauge.add_metric(self._labels, value)
        return gauge

    def _counter(self, name: str, text: str, value: float, **labels: str) -> Metric:
        names = ("worker", "pool", *labels)
        counter = CounterMetricFamily(f"baton_{name}", text, labels=names)
        counter.add_metric((*self._labels, *labels.values()), value)
        return counter

    @contextlib.contextmanager
    def served(self, host: str, port: int) -> Iterator[str]:
        """Serve the metrics over HTTP; yields their host:port."""
        registry = CollectorRegistry()
        registry.register(self)
        server, thread = start_http_server(port, host.strip("[]"), registry=registry)
        try:
            yield f"{host}:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def problems_of(parts: Mapping[str, Callable[[], None]]) -> list[str]:
    """Run every part's check. Returns one line per failed check."""
    problems = []
    for name, check in parts.items():
        try:
            check()
        except AssertionError as error:
            problems.append(f"{name}: {error or 'its check failed'}")
    return problems
