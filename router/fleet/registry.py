"""The registry as this router follows it, and reports to it, through any number of its restarts.

With the registry gone, the last known fleet continues to serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc.aio

from baton.config.router import RouterConfig
from baton.control.calls import control_channel, control_stub
from baton.fleet import Role, WorkerState
from baton.grpc_options import DIRECT, sends_pings
from baton.identity.identity import Identity
from baton.pacing import Backoff
from baton.v1 import common_pb2, control_pb2, control_pb2_grpc, worker_pb2
from baton.wire import ANY_ROLE, ROLES, STATE_OF
from router.fleet.fleet import ReportedLoad, RolesAway
from router.fleet.fleet_links import FleetReport, WorkerReport
from router.fleet.worker_facts import WorkerFacts

log = logging.getLogger(__name__)

M = TypeVar("M")


@dataclass(frozen=True)
class RegistryAccess:
    """Where a registry is, and as whom it is asked."""

    address: str
    config: RouterConfig
    own: Identity

    @contextlib.asynccontextmanager
    async def stub(self) -> AsyncIterator[control_pb2_grpc.ControlServiceStub]:
        """Connect to the registry.

        A registry that answers no ping for twice `keepalive_s` is lost, as is one whose host
        vanished silently. It is tried again soon and often. Message sizes are the router's.
        """
        links, most_bytes = self.config.links, self.config.clients.max_message_bytes
        options = (
            *sends_pings(links.keepalive_s),
            ("grpc.initial_reconnect_backoff_ms", int(links.reconnect_min_s * 1e3)),
            ("grpc.min_reconnect_backoff_ms", int(links.reconnect_min_s * 1e3)),
            ("grpc.max_reconnect_backoff_ms", int(links.reconnect_max_s * 1e3)),
            ("grpc.max_receive_message_length", most_bytes),
            ("grpc.max_send_message_length", most_bytes),
            ("grpc.use_local_subchannel_pool", 1),
            *DIRECT,
        )
        async with control_channel(grpc.aio, self.address, options, self.own) as channel:
            yield control_stub(channel, self.own)


class Followed(Generic[M]):
    """Own a stream from the registry and the last message on it. `take` gets each message,
    `on_lost` is called once when no more come."""

    def __init__(
        self,
        registry: RegistryAccess,
        silence_s: float,
        call: Callable[[control_pb2_grpc.ControlServiceStub], grpc.aio.UnaryStreamCall[Any, M]],
        take: Callable[[M], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`silence_s`: the registry is asked again after this long without a message."""
        self._registry, self._silence_s = registry, silence_s
        self._call, self._take, self._on_lost = call, take, on_lost
        self.last: M | None = None
        self.is_connected = False
        self._is_loss_logged = False  # once, until it is back
        self._has_ended, self._news = False, asyncio.Event()

    async def run(self) -> None:
        """Follow the registry until cancelled, through any number of its restarts."""
        try:
            await self._follow_always()
        finally:
            self._has_ended = True
            self._announce()

    async def next_after(self, seen: M | None) -> M | None:
        """Return the newest message once it is not `seen`; None when none comes any more."""
        while not self._has_ended and (self.last is None or self.last is seen):
            await self._news.wait()
        return None if self._has_ended else self.last

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _follow_always(self) -> None:
        links = self._registry.config.links
        backoff = Backoff(links.reconnect_min_s, links.reconnect_max_s)
        while True:
            why = "it ended the stream"
            try:
                async with self._registry.stub() as stub:  # each by the certificate of the moment
                    await self._follow(stub, backoff)
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
            except TimeoutError:
                why = f"silent for {self._silence_s:g} s"
            self._lose(why)
            await asyncio.sleep(backoff.next_s())

    async def _follow(self, stub: control_pb2_grpc.ControlServiceStub, backoff: Backoff) -> None:
        """Follow one stream until it ends or falls silent."""
        call = self._call(stub)
        messages = aiter(call)
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    message = await anext(messages, None)
                if message is None:
                    return
                backoff.reset()
                if self._is_loss_logged:
                    self._is_loss_logged = False
                    log.info("registry %s: connected", self._registry.address)
                self.is_connected, self.last = True, message
                self._take(message)
                self._announce()
        finally:
            call.cancel()

    def _lose(self, why: str) -> None:
        if not self._is_loss_logged:
            self._is_loss_logged = True
            log.warning("registry %s: %s", self._registry.address, why)
        if self.is_connected:
            self.is_connected = False
            self._on_lost()


_PREFILLS = (ROLES[Role.PREFILL], ROLES[Role.MIXED])
_DECODES = (ROLES[Role.DECODE], ROLES[Role.MIXED])


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
        STATE_OF.get(worker.state, WorkerState.STARTING),
        read_load(worker.load),
        prefills=worker.active_role in (ANY_ROLE, *_PREFILLS),
        decodes=worker.active_role in (ANY_ROLE, *_DECODES),
    )


def _read_away(message: control_pb2.WatchFleetResponse) -> RolesAway:
    return RolesAway(
        prefill=_is_away(message, ROLES[Role.PREFILL], _PREFILLS),
        decode=_is_away(message, ROLES[Role.DECODE], _DECODES),
    )


def _is_away(
    message: control_pb2.WatchFleetResponse,
    role: common_pb2.WorkerRole.ValueType,
    can: Collection[common_pb2.WorkerRole.ValueType],
) -> bool:
    """Whether no pool wants workers for the role, or those that return to it have yet to start.

    If a registry keeps pools and knows none yet, both roles are away.
    """
    if not message.pools:
        return message.keeps_pools
    pools = [pool for pool in message.pools if pool.role in can]
    is_wanted = any(pool.desired_replicas for pool in pools)
    return bool(pools) and (not is_wanted or any(role in pool.comes_back_for for pool in pools))


def watch_fleet(
    registry: RegistryAccess,
    on_fleet: Callable[[FleetReport], None],
    on_lost: Callable[[], None],
) -> Followed[control_pb2.WatchFleetResponse]:
    """Make the stream of the registry's fleet."""
    return Followed(
        registry,
        registry.config.links.registry_silence_s,
        lambda stub: stub.WatchFleet(control_pb2.WatchFleetRequest()),
        lambda message: on_fleet(read_fleet(message)),
        on_lost,
    )


EVERY_S = 1.0
_LEAVE_WITHIN_S = 1.0


async def keep_reporting(
    registry: RegistryAccess, report: Callable[[], control_pb2.ReportRouterRequest]
) -> None:
    """Report a router's figures to the registry until cancelled. `Followed` logs a lost
    registry."""
    links = registry.config.links
    backoff = Backoff(links.reconnect_min_s, links.reconnect_max_s)

    async def reports() -> AsyncIterator[control_pb2.ReportRouterRequest]:
        while True:
            yield report()
            await asyncio.sleep(EVERY_S)
            backoff.reset()

    async def farewell() -> AsyncIterator[control_pb2.ReportRouterRequest]:
        last = report()
        last.leaves = True
        yield last

    try:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async with registry.stub() as stub:
                    await stub.ReportRouter(reports())
            await asyncio.sleep(backoff.next_s())
    finally:
        # A call that only breaks would count as cut off, for minutes.
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with registry.stub() as stub:
                await stub.ReportRouter(farewell(), timeout=_LEAVE_WITHIN_S)
