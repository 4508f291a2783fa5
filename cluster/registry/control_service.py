"""`ControlService` over a `Registry`: protobuf in, protobuf out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from baton.errors import BatonError, OtherModelError
from baton.fleet import Role
from baton.identity.identity import Identity
from baton.status import abort, first_message
from baton.v1 import control_pb2, control_pb2_grpc, worker_pb2
from baton.wire import ANY_ROLE, ROLES, STATES
from cluster.pools.pool_table import Pool, Slot
from cluster.progress import Progress
from cluster.registry.control_access import control_server, listen_at
from cluster.registry.pairing import unpaired
from cluster.registry.pool_changes import PoolBacking, PoolChanges
from cluster.registry.registry import Registration, Registry, Stream
from cluster.registry.routers import Unit
from cluster.role_plan import RolePlan
from kv_transfer.process import ProcessIdentity

log = logging.getLogger(__name__)

FLEET_EVERY_S, UNITS_EVERY_S = 1.0, 5.0
T = TypeVar("T")

Context = grpc.aio.ServicerContext[Any, Any]


class Changes:
    """Wakes everyone who waits for the registry's version to move on."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Return on the next announcement, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # `wait_for` of Python 3.11 may lose a cancel
                await self._changed.wait()

    async def of(self, read: Callable[[], T], every_s: float) -> AsyncIterator[T]:
        """Yield what `read` returns: now, after each change of it, and at least `every_s`."""
        last: T | None = None
        yielded_at = 0.0
        while True:
            value, now = read(), time.monotonic()
            if value != last or now - yielded_at >= every_s:
                last, yielded_at = value, now
                yield value
            await self.wait(max(0.0, every_s - (now - yielded_at)))


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """Serves one registry. `changes` is announced after everything that may have changed it."""

    def __init__(self, registry: Registry, changes: Changes, backing: PoolBacking) -> None:
        self._registry = registry
        self._changes = changes
        self._backing = backing
        self._pools = PoolChanges(registry, backing)

    async def Register(  # noqa: N802
        self, request_iterator: AsyncIterator[control_pb2.RegisterRequest], context: Context
    ) -> AsyncIterator[control_pb2.RegisterResponse]:
        within_s = self._registry.config.register_within_s
        first = await first_message(request_iterator, within_s, context)
        if first is None or not first.worker.ref.worker_id:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the first message must carry `worker`"
            )
        ref = first.worker.ref
        try:
            stream = self._registry.register(_registration(first.worker))
        except OtherModelError as error:
            log.error("%s", error.message)
            await abort(context, error)
        if stream is None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"a newer incarnation of {ref.worker_id} is registered",
            )
        log.info("worker %s (incarnation %d) registered", ref.worker_id, ref.incarnation)
        beats = asyncio.create_task(self._heartbeats(stream, first, request_iterator))
        try:
            is_asked = False
            while not beats.done() and self._registry.hears(stream):
                if self._registry.drain_asked(stream) and not is_asked:
                    is_asked = True
                    yield control_pb2.RegisterResponse(drain=True)
                changed = asyncio.create_task(self._changes.wait(1.0))
                await asyncio.wait({beats, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
        finally:
            beats.cancel()

    async def _heartbeats(
        self,
        stream: Stream,
        first: control_pb2.RegisterRequest,
        rest: AsyncIterator[control_pb2.RegisterRequest],
    ) -> None:
        """Book heartbeats until the worker leaves or is not heard on this stream any more."""
        version = -1
        if self._book(stream, first):
            self._changes.announce()
            async for message in rest:
                if not self._book(stream, message):
                    return
                now = self._registry.refresh()
                if now != version:
                    version = now
                    self._changes.announce()

    def _book(self, stream: Stream, message: control_pb2.RegisterRequest) -> bool:
        progress = None
        if message.HasField("progress"):
            said = message.progress
            is_predicted = said.HasField("predicted_step_s")
            predicted_step_s = said.predicted_step_s if is_predicted else None
            progress = Progress(said.runnable, said.idle_s, predicted_step_s)
        load = message.load.SerializeToString() if message.HasField("load") else b""
        return self._registry.heartbeat(stream, progress, load, message.draining)

    async def WatchFleet(  # noqa: N802
        self, request: control_pb2.WatchFleetRequest, context: Context
    ) -> AsyncIterator[control_pb2.WatchFleetResponse]:
        async for _ in self._changes.of(lambda: self._registry.version, FLEET_EVERY_S):
            yield fleet_message(self._registry)

    async def WatchUnits(  # noqa: N802
        self, request: control_pb2.WatchUnitsRequest, context: Context
    ) -> AsyncIterator[control_pb2.WatchUnitsResponse]:
        async for units in self._changes.of(lambda: self._registry.units.all, UNITS_EVERY_S):
            yield control_pb2.WatchUnitsResponse(
                units=[control_pb2.Unit(**vars(unit)) for unit in units]
            )

    async def SetUnits(  # noqa: N802
        self, request: control_pb2.SetUnitsRequest, context: Context
    ) -> control_pb2.SetUnitsResponse:
        units = [Unit(unit.code, unit.control_address, unit.share) for unit in request.units]
        async with self._change(context):
            self._registry.units.set(units)
            self._backing.save()
        return control_pb2.SetUnitsResponse()

    async def ReportRouter(  # noqa: N802
        self,
        request_iterator: AsyncIterator[control_pb2.ReportRouterRequest],
        context: Context,
    ) -> control_pb2.ReportRouterResponse:
        routers, router_id = self._registry.routers, ""
        call = routers.opened()
        try:
            async for report in request_iterator:
                if not report.router_id or router_id not in ("", report.router_id):
                    await context.abort(
                        grpc.StatusCode.INVALID_ARGUMENT,
                        "router_id must be set, and the same in every report",
                    )
                router_id = report.router_id
                if report.leaves:
                    routers.left(router_id, call)
                else:
                    routers.report(router_id, report.SerializeToString(), call)
        finally:
            routers.lost(router_id, call)
        return control_pb2.ReportRouterResponse()

    async def SetReplicas(  # noqa: N802
        self, request: control_pb2.SetReplicasRequest, context: Context
    ) -> control_pb2.SetReplicasResponse:
        async with self._change(context):
            previous = await self._pools.set_replicas(request.pool, request.replicas)
        return control_pb2.SetReplicasResponse(previous_replicas=previous)

    async def SetRolePlan(  # noqa: N802
        self, request: control_pb2.SetRolePlanRequest, context: Context
    ) -> control_pb2.SetRolePlanResponse:
        plan = RolePlan(request.plan.prefill, request.plan.decode)
        async with self._change(context):
            self._pools.set_role_plan(request.pool, plan)
        return control_pb2.SetRolePlanResponse()

    async def AddPool(  # noqa: N802
        self, request: control_pb2.AddPoolRequest, context: Context
    ) -> control_pb2.AddPoolResponse:
        async with self._change(context):
            await self._pools.add(request.pool, request.config, request.replicas)
        return control_pb2.AddPoolResponse()

    async def ClosePods(  # noqa: N802
        self, request: control_pb2.ClosePodsRequest, context: Context
    ) -> control_pb2.ClosePodsResponse:
        async with self._change(context):
            self._pools.close_pods(request.pod_names)
        return control_pb2.ClosePodsResponse()

    async def AgreeDtype(  # noqa: N802
        self, request: control_pb2.AgreeDtypeRequest, context: Context
    ) -> control_pb2.AgreeDtypeResponse:
        async with self._change(context):
            agreed = self._pools.agree_dtype(request.pool, request.dtype)
        return control_pb2.AgreeDtypeResponse(dtype=agreed)

    async def RemovePool(  # noqa: N802
        self, request: control_pb2.RemovePoolRequest, context: Context
    ) -> control_pb2.RemovePoolResponse:
        async with self._change(context):
            await self._pools.remove(request.pool)
        return control_pb2.RemovePoolResponse()

    @contextlib.asynccontextmanager
    async def _change(self, context: Context) -> AsyncIterator[None]:
        """Announce the change that the block makes. A BatonError in it refuses the call."""
        try:
            yield
        except BatonError as error:
            await abort(context, error)
        self._changes.announce()

    async def Drain(  # noqa: N802
        self, request: control_pb2.ControlServiceDrainRequest, context: Context
    ) -> control_pb2.ControlServiceDrainResponse:
        async with self._change(context):
            self._registry.ask_drain(request.worker_id)
        return control_pb2.ControlServiceDrainResponse()


def _registration(info: control_pb2.WorkerInfo) -> Registration:
    return Registration(
        info.ref.worker_id,
        info.ref.incarnation,
        info.pool,
        info.SerializeToString(),
        info.model,
        info.model_fingerprint,
        info.dtype,
        frozenset(ProcessIdentity.from_proto(rank.process) for rank in info.ref.ranks),
    )


@contextlib.asynccontextmanager
async def serve(
    registry: Registry,
    changes: Changes,
    listen: str,
    identity: Identity,
    backing: PoolBacking | None = None,
) -> AsyncIterator[str]:
    """Serve the registry with health checks; yields the bound host:port. `identity`: the
    operator's. Raises OSError."""
    server = control_server(identity)
    service = ControlService(registry, changes, backing or PoolBacking())
    control_pb2_grpc.add_ControlServiceServicer_to_server(service, server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    host = listen.rpartition(":")[0]
    try:
        port = listen_at(server, listen, identity)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}: {error}") from error
    await server.start()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    looking = asyncio.create_task(_look(registry, changes))
    try:
        yield f"{host}:{port}"
    finally:
        looking.cancel()
        await server.stop(grace=0.2)


async def _look(registry: Registry, changes: Changes) -> None:
    """Let time pass in the registry. Announce what follows from silence; log unpaired workers."""
    version = registry.refresh()
    known: dict[str, str] = {}
    while True:
        await asyncio.sleep(registry.config.look_s)
        former, version = version, registry.refresh()
        if version != former:
            changes.announce()
            former_known, known = known, unpaired(fleet_message(registry))
            for worker_id in known.keys() - former_known.keys():
                log.warning("%s", known[worker_id])


# --- the registry as messages -------------------------------------------------------------------


def fleet_message(registry: Registry) -> control_pb2.WatchFleetResponse:
    pools, routers = registry.pools, registry.routers
    return control_pb2.WatchFleetResponse(
        version=registry.version,
        workers=[
            control_pb2.FleetWorker(
                info=control_pb2.WorkerInfo.FromString(entry.registration.info),
                state=STATES[entry.state],
                load=worker_pb2.WorkerLoad.FromString(entry.load),
                active_role=ANY_ROLE if entry.active_role is None else ROLES[entry.active_role],
            )
            for entry in registry.workers()
        ],
        pools=[_pool_message(pool, registry.staying(pool.name)) for pool in pools.status()],
        silent_routers=[
            control_pb2.SilentRouter(router_id=router_id, silent_s=silent_s)
            for router_id, silent_s in routers.silent_s().items()
        ],
        routers=[control_pb2.ReportRouterRequest.FromString(each) for each in routers.reports()],
        keeps_pools=registry.keeps_pools,
        settles=registry.settles,
        model_fingerprint=registry.model_fingerprint,
        closed_pods=sorted(pools.closed_pods),
    )


def _pool_message(pool: Pool, staying: Sequence[Slot]) -> control_pb2.PoolStatus:
    """Describe a pool. `staying`: its slots that stay, of which the last would leave first."""
    settings = pool.settings
    standing = {slot.worker_id: order for order, slot in enumerate(staying)}
    return control_pb2.PoolStatus(
        name=pool.name,
        role=ROLES[settings.role],
        desired_replicas=pool.desired_replicas,
        live_replicas=pool.live_replicas,
        last_error=pool.last_error,
        num_failed_starts=pool.num_failed_starts,
        pending_replicas=pool.pending_replicas,
        role_plan=control_pb2.RolePlan(**vars(pool.role_plan))
        if settings.role is Role.MIXED
        else None,
        settings_digest=settings.digest,
        places=[
            control_pb2.PoolPlace(
                worker_id=slot.worker_id,
                pod_name=slot.pod_name or "",
                standing=standing.get(slot.worker_id),
            )
            for slot in pool.slots
        ],
        comes_back_for=[ROLES[role] for role in pool.comes_back_for],
    )
