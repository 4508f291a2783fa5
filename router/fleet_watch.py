"""Follows the registry; with the registry gone, the last known fleet goes on serving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from baton.config.router import RouterConfig
from baton.v1 import common_pb2, control_pb2, worker_pb2
from router.fleet import ReportedLoad, WorkerState
from router.fleet_links import FleetReport, WorkerReport
from router.following import Following
from router.roles_away import RolesAway
from router.worker_facts import WorkerFacts

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
        _read_away(message),
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


def _read_away(message: control_pb2.WatchFleetResponse) -> RolesAway:
    return RolesAway(
        prefill=_is_away(message, common_pb2.WORKER_ROLE_PREFILL, _PREFILLS),
        decode=_is_away(message, common_pb2.WORKER_ROLE_DECODE, _DECODES),
    )


def _is_away(
    message: control_pb2.WatchFleetResponse,
    role: common_pb2.WorkerRole.ValueType,
    can: Collection[common_pb2.WorkerRole.ValueType],
) -> bool:
    """Whether no pool is to have workers for the role, or those of one have yet to start. If a
    registry keeps pools and knows none yet, both roles are to come."""
    if not message.pools:
        return message.keeps_pools
    pools = [pool for pool in message.pools if pool.role in can]
    is_wanted = any(pool.desired_replicas for pool in pools)
    return bool(pools) and (not is_wanted or any(role in pool.comes_back_for for pool in pools))


class FleetWatch:
    """Own the stream from the registry and the last answer it gave."""

    def __init__(
        self,
        address: str,
        config: RouterConfig,
        on_fleet: Callable[[FleetReport], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._on_fleet = on_fleet
        self.last: control_pb2.WatchFleetResponse | None = None
        self._has_ended = False
        self._news = asyncio.Condition()
        self._following = Following(
            address,
            config,
            config.registry_silence_s,
            lambda stub: stub.WatchFleet(control_pb2.WatchFleetRequest()),
            self._take,
            on_lost,
        )

    @property
    def is_connected(self) -> bool:
        return self._following.is_connected

    async def run(self) -> None:
        """Follow the registry until cancelled, through any number of its restarts."""
        try:
            await self._following.run()
        finally:
            self._has_ended = True
            async with self._news:
                self._news.notify_all()

    async def _take(self, message: control_pb2.WatchFleetResponse) -> None:
        self.last = message
        self._on_fleet(read_fleet(message))
        async with self._news:
            self._news.notify_all()

    async def next_after(
        self, seen: control_pb2.WatchFleetResponse | None
    ) -> control_pb2.WatchFleetResponse | None:
        """The registry's newest answer that is not `seen`; None: none comes any more."""
        async with self._news:
            await self._news.wait_for(
                lambda: self._has_ended or (self.last is not None and self.last is not seen)
            )
        return None if self._has_ended else self.last
