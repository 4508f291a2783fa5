"""Follows the registry; with the registry gone, the last known fleet goes on serving."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import grpc.aio

from baton.config.router import RouterConfig
from baton.v1 import common_pb2, control_pb2, control_pb2_grpc, worker_pb2
from router.backoff import Backoff
from router.fleet import ReportedLoad, WorkerState
from router.fleet_links import FleetReport, WorkerReport
from router.stopped_pools import PoolReport
from router.worker_facts import WorkerFacts
from router.worker_link import channel_options

log = logging.getLogger(__name__)

_STATES = {
    control_pb2.WORKER_STATE_STARTING: WorkerState.STARTING,
    control_pb2.WORKER_STATE_LIVE: WorkerState.LIVE,
    control_pb2.WORKER_STATE_SUSPECT: WorkerState.SUSPECT,
    control_pb2.WORKER_STATE_DRAINING: WorkerState.DRAINING,
    control_pb2.WORKER_STATE_GONE: WorkerState.GONE,
}
_ANY = common_pb2.WORKER_ROLE_UNSPECIFIED
_PREFILLS = (common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_MIXED)
_DECODES = (common_pb2.WORKER_ROLE_DECODE, common_pb2.WORKER_ROLE_MIXED)


def read_facts(info: control_pb2.WorkerInfo) -> WorkerFacts:
    return WorkerFacts(
        worker_id=info.ref.worker_id,
        incarnation=info.ref.incarnation,
        can_prefill=info.role in _PREFILLS,
        can_decode=info.role in _DECODES,
        address=info.address,
        model=info.model,
        kv_fingerprint=info.kv_fingerprint,
        block_size=max(1, info.block_size),
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        max_request_tokens=info.max_request_tokens,
        max_held_tokens=info.max_held_tokens_per_request,
        max_num_seqs=info.max_num_seqs,
        vocab_size=info.vocab_size,
        kv_bytes_per_token=info.kv_bytes_per_token,
        ref=info.ref,
        pool=info.pool,
    )


def read_load(load: worker_pb2.WorkerLoad) -> ReportedLoad:
    return ReportedLoad(
        num_requests=load.num_waiting + load.num_running + load.num_reserved,
        num_queued_tokens=load.num_queued_tokens,
        num_quarantined_blocks=load.num_quarantined_blocks,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        decode_step_s=load.decode_step_s,
        handoff_bytes_per_s=load.handoff_bytes_per_s,
    )


def read_fleet(message: control_pb2.WatchFleetResponse) -> FleetReport:
    return FleetReport(
        [_read_worker(worker) for worker in message.workers],
        read_pools(message),
        message.settles,
        message.model_fingerprint,
    )


def _read_worker(worker: control_pb2.FleetWorker) -> WorkerReport:
    return WorkerReport(
        read_facts(worker.info),
        _STATES.get(worker.state, WorkerState.STARTING),
        read_load(worker.load),
        prefills=worker.active_role in (_ANY, *_PREFILLS),
        decodes=worker.active_role in (_ANY, *_DECODES),
    )


def read_pools(message: control_pb2.WatchFleetResponse) -> list[PoolReport]:
    return [
        PoolReport(
            name=pool.name,
            can_prefill=pool.role in _PREFILLS,
            can_decode=pool.role in _DECODES,
            desired_replicas=pool.desired_replicas,
            live_replicas=pool.live_replicas,
            num_failed_starts=pool.num_failed_starts,
            prefill_comes_back=common_pb2.WORKER_ROLE_PREFILL in pool.comes_back_for,
            decode_comes_back=common_pb2.WORKER_ROLE_DECODE in pool.comes_back_for,
        )
        for pool in message.pools
    ]


class FleetWatch:
    """Own the stream from the registry and the last answer it gave."""

    def __init__(
        self,
        address: str,
        config: RouterConfig,
        on_fleet: Callable[[FleetReport], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._address, self._config = address, config
        self._on_fleet, self._on_lost = on_fleet, on_lost
        self.last: control_pb2.WatchFleetResponse | None = None
        self.is_connected = False
        self._told_lost = False  # warned of once, until it is back
        self._news = asyncio.Condition()

    async def run(self) -> None:
        """Follow the registry until cancelled, through any number of its restarts."""
        backoff = Backoff(
            self._config.reconnect_min_s, self._config.reconnect_max_s, random.Random()
        )
        options = channel_options(self._config)
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            while True:
                why = "it ended the stream"
                try:
                    await self._follow(stub, backoff)
                except grpc.aio.AioRpcError as error:
                    why = f"{error.code().name}: {error.details()}"
                except TimeoutError:
                    why = f"silent for {self._config.registry_silence_s:g} s"
                self._lose(why)
                await asyncio.sleep(backoff.next_s())

    async def _follow(self, stub: control_pb2_grpc.ControlServiceStub, backoff: Backoff) -> None:
        """One stream, until it ends or falls silent: it speaks about once a second."""
        call = stub.WatchFleet(control_pb2.WatchFleetRequest())
        messages = aiter(call)
        try:
            while True:
                async with asyncio.timeout(self._config.registry_silence_s):
                    message = await anext(messages, None)
                if message is None:
                    return
                backoff.reset()
                await self._take(message)
        finally:
            call.cancel()

    def _lose(self, why: str) -> None:
        if not self._told_lost:
            self._told_lost = True
            log.warning("registry %s: %s", self._address, why)
        if self.is_connected:
            self.is_connected = False
            self._on_lost()

    async def _take(self, message: control_pb2.WatchFleetResponse) -> None:
        if self._told_lost:
            self._told_lost = False
            log.info("registry %s: connected", self._address)
        self.is_connected, self.last = True, message
        self._on_fleet(read_fleet(message))
        async with self._news:
            self._news.notify_all()

    async def next_after(
        self, seen: control_pb2.WatchFleetResponse | None
    ) -> control_pb2.WatchFleetResponse:
        """The registry's newest answer that is not `seen`."""
        async with self._news:
            await self._news.wait_for(lambda: self.last is not None and self.last is not seen)
        assert self.last is not None
        return self.last
