"""Which unit of a router process a request goes to.

1. `Units` follows the list of units and keeps a router for each of them.
2. A request that names its unit goes there. One that runs here already is attached to. For others
   the unit is drawn by the hash of the request id, in proportion to the units' shares.
3. Until the unit has its router, and until the list is known, requests wait here: `max_queue` of
   them at most, each until its own deadline.

Nothing else in the router knows that there are several units.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

from baton.clock import Clock, LoopClock
from baton.config.router import RouterConfig
from baton.errors import (
    BatonError,
    DeadlineError,
    NotFoundError,
    OverloadedError,
    ShuttingDownError,
    UnavailableError,
)
from baton.identity.identity import Identity
from baton.v1 import control_pb2
from router.fleet.registry import Followed, RegistryAccess, keep_reporting
from router.report.metrics import METRICS_EVERY_S, RouterMetrics
from router.report.traces import open_traces
from router.request.client_request import ClientRequest, RequestHead, wire_id
from router.request.request_run import SHUTTING_DOWN
from router.request.run_parts import ServedModel, not_resumable
from router.text import TextModel
from router.units.router import Router
from router.units.snapshots import Snapshots
from router.units.unit_router import UnitKey, UnitRouter, drawn, read_tokenizer

log = logging.getLogger(__name__)

HEARD_WITHIN_S = 2.0
UNITS_EVERY_S = 5.0  # the list comes at least this often
_LEAST_REQUEST_BYTES, _BYTES_OF_TOKEN = 4 << 20, 6 * 8  # escapes, text


class Units:
    """Own the units' routers, and the requests that wait for one. Lives on one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        control_address: str,
        model_names: tuple[str, ...],
        own: Identity,
        *,
        read: Callable[[RegistryAccess], Awaitable[tuple[TextModel, bytes]]] = read_tokenizer,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`model_names`: what clients call the model; answers have the first. `own`: who this
        process is inside. `read`: the tokenizer of the unit of a registry."""
        self.config, self.model_names, self.clock = config, model_names, clock or LoopClock()
        self._own = own
        self.metrics = RouterMetrics(model_names[0], config.metrics)
        self._trace = open_traces(config.traces.endpoint, config.traces.ratio)
        self.snapshots = Snapshots()
        self.num_waiting = 0
        self._process_id = f"router-{uuid.uuid4().hex[:12]}"
        self._control_address, self._read, self._rng = control_address, read, rng
        self.listed: list[UnitRouter] = []  # as the list has them, the oldest first
        self.leaving: list[UnitRouter] = []
        self._changed = asyncio.Event()
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self.fault: asyncio.Future[None]
        """Done once the process cannot serve any longer. What runs continues until then."""

    async def start(self) -> None:
        """Begin to follow the list of units."""
        self.fault = asyncio.get_running_loop().create_future()
        units = Followed(
            self._registry_at(self._control_address),
            UNITS_EVERY_S + self.config.links.registry_silence_s,
            lambda stub: stub.WatchUnits(control_pb2.WatchUnitsRequest()),
            self._take_units,
        )
        for work in (units.run(), self._measure()):
            task = asyncio.create_task(work)
            task.add_done_callback(self.report_fault)
            self._tasks.append(task)

    async def can_serve(self) -> None:
        """Return once every unit that has a share knows its fleet. A silent registry is not waited
        for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARD_WITHIN_S):
                while not self._has_all:
                    await self._changed.wait()
                for router in self.routers:
                    await router.links.wait_reported()

    def report_fault(self, ended: asyncio.Future[None]) -> None:
        """A task has ended that must not end while the router serves."""
        if not self._closing and not self.fault.done():
            error = None if ended.cancelled() else ended.exception()
            log.critical("%s ended: %r", ended, error, exc_info=error)
            self.fault.set_result(None)

    async def close(self, drain_s: float = 0.0) -> None:
        """Take nothing new and give running requests `drain_s` to end. Then leave the rest to the
        decode workers, which keep it for the next router."""
        self._closing = True
        self._announce()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(unit.close(drain_s) for unit in (*self.listed, *self.leaving)))
        if self._tasks:
            await asyncio.wait(self._tasks)

    def leave_requests(self) -> None:
        """Take nothing new, and leave what runs to its decode workers at once."""
        for router in self.routers:
            router.leave_requests()

    # --- which router --------------------------------------------------------------------------

    @property
    def routers(self) -> list[Router]:
        """The routers of all units, also of those that have left the list and run requests."""
        units = (*self.listed, *self.leaving)
        return [unit.router for unit in units if unit.router is not None]

    @property
    def serves(self) -> bool:
        """Whether some unit that new requests go to has workers for them."""
        routers = [unit.router for unit in self.listed if unit.share]
        return any(router.admission.serves for router in routers if router is not None)

    @property
    def max_request_bytes(self) -> int:
        """Bytes that a request may have, over gRPC or HTTP; the most while no model is known."""
        if self.config.clients.max_request_bytes is not None:
            return self.config.clients.max_request_bytes
        contexts = [router.text.max_model_len for router in self.routers]
        if not contexts or None in contexts:
            return self.config.clients.max_message_bytes
        most = max(_LEAST_REQUEST_BYTES, *(_BYTES_OF_TOKEN * (each or 0) for each in contexts))
        return min(most, self.config.clients.max_message_bytes)

    @property
    def num_active(self) -> int:
        return sum(router.num_active for router in self.routers)

    async def router_for(self, request: ClientRequest) -> Router:
        """Wait for the router that a request goes to.

        Raises NotResumableError when what the request names is served no more, OverloadedError,
        DeadlineError, UnavailableError.
        """
        head = request.head
        for router in self.routers:
            if router.has(head.key):
                return router
        is_sought = head.resume_from_index is not None and not head.unit
        has_tokens = is_sought and head.resume_from_index != 0  # of whichever unit ran it

        def found() -> Router | None:
            unit = self._unit_for(head)
            return None if unit is None or (has_tokens and not self._has_all) else unit.router

        router = await self._until_there(found, head.timeout_s)
        if is_sought and len(self.routers) > 1:
            return await self._router_that_keeps(request, self.routers) or router
        return router

    async def main_router(self) -> Router:
        """Wait for the router of the unit that gets most requests."""

        def found() -> Router | None:
            shares = [unit.share for unit in self.listed]
            return self.listed[shares.index(max(shares))].router if shares else None

        return await self._until_there(found, None)

    async def abort(self, tenant: str, request_id: str) -> None:
        """Abort a request wherever it runs, also if another router process follows it. Raises
        NotFoundError."""
        is_found = False
        for router in self.routers:
            with contextlib.suppress(NotFoundError):
                router.abort(tenant, request_id)
                is_found = True
        if is_found:
            return
        named, timeout_s = wire_id(tenant, request_id), self.config.timeouts.attach_s
        asked = (router.links.cancel_anywhere(named, timeout_s) for router in self.routers)
        if not any(await asyncio.gather(*asked)):
            raise NotFoundError(f"no request {request_id!r} runs here", field="request_id")

    def abort_everywhere(self, tenant: str, request_id: str) -> None:
        """Abort a request that may run here, or that another router may have begun."""
        for router in self.routers:
            router.abort_everywhere(tenant, request_id)

    def _unit_for(self, head: RequestHead) -> UnitRouter | None:
        """Return the unit of a request. None: no list is known yet. Raises NotResumableError."""
        if not self.listed:
            return None
        if head.unit:
            for unit in self.listed:
                is_named = unit.key.code == head.unit.rpartition("/")[0]
                if is_named and (unit.router is None or unit.router.model.unit == head.unit):
                    return unit
            if head.resume_from_index:
                raise not_resumable()
        return self.listed[drawn(head.request_id, self._shares)]

    async def _router_that_keeps(
        self, request: ClientRequest, routers: list[Router]
    ) -> Router | None:
        """Return the router of the unit whose decode workers keep the request; None: no unit's do.

        Raises what a search does when no unit's decode workers are known to keep it.
        """
        searches = (router.keeps(request) for router in routers)
        answers = await asyncio.gather(*searches, return_exceptions=True)
        for router, answer in zip(routers, answers, strict=True):
            if answer is True:
                return router
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return None

    @property
    def _shares(self) -> list[float]:
        """The units' shares, as listed. A unit without a router leaves its share to the other."""
        ready = [unit.share if unit.router is not None else 0.0 for unit in self.listed]
        return ready if any(ready) else [unit.share for unit in self.listed]

    # --- waiting -------------------------------------------------------------------------------

    @property
    def _has_all(self) -> bool:
        """Whether the list is known, and every unit that has a share has its router."""
        shared = [unit for unit in self.listed if unit.share > 0]
        return bool(shared) and all(unit.router is not None for unit in shared)

    async def _until_there(
        self, found: Callable[[], Router | None], named_s: float | None
    ) -> Router:
        """Wait for a router. `named_s`: the timeout that the request names. Raises OverloadedError,
        DeadlineError, UnavailableError, and what `found` does."""
        if (router := found()) is not None:
            return router
        async with self._waiting(named_s):
            while (router := found()) is None:
                if self._closing:
                    raise ShuttingDownError(SHUTTING_DOWN, has_begun=False, retry_after_s=1.0)
                await self._changed.wait()
        return router

    @contextlib.asynccontextmanager
    async def _waiting(self, named_s: float | None) -> AsyncIterator[None]:
        """Count a request among those that wait, until its deadline."""
        if self.num_waiting >= self.config.admission.max_queue:
            raise OverloadedError(
                f"{self.num_waiting} requests wait for a first worker",
                retry_after_s=self.config.admission.overload_retry_s,
            )
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self.config.timeouts.of_request(named_s)):
                yield
        except TimeoutError:
            raise self._in_vain(named_s) from None
        finally:
            self.num_waiting -= 1

    def _in_vain(self, named_s: float | None) -> BatonError:
        missing = [unit for unit in self.listed if unit.router is None]
        if missing:
            named = " and ".join(unit.key.code or "the cluster" for unit in missing)
            message = f"no worker of {named} has sent its tokenizer yet"
        else:
            message = f"the control service at {self._control_address} reports no units"
        if named_s is not None:
            return DeadlineError(f"the request's deadline has passed: {message}")
        return UnavailableError(message, retry_after_s=1.0)

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- the list of units ---------------------------------------------------------------------

    def _take_units(self, message: control_pb2.WatchUnitsResponse) -> None:
        known = {unit.key: unit for unit in self.listed}
        units = []
        for listed in message.units:
            key = UnitKey(listed.code, listed.control_address or self._control_address)
            unit = known.pop(key, None) or self._enter(key)
            unit.share = listed.share
            units.append(unit)
        self.listed = units
        for unit in known.values():
            log.info("unit %r leaves", unit.key.code)
            self.leaving.append(unit)
            unit.leave()
        self._announce()

    def _enter(self, key: UnitKey) -> UnitRouter:
        log.info("unit %r at %s", key.code, key.control_address)
        unit = UnitRouter(key, self._make, self._announce)

        def ended(task: asyncio.Task[None]) -> None:
            if unit in self.leaving:
                self.leaving.remove(unit)
            if not unit.has_left or (not task.cancelled() and task.exception() is not None):
                self.report_fault(task)

        unit.start(ended)
        return unit

    async def _make(self, key: UnitKey) -> Router:
        registry = self._registry_at(key.control_address)
        reports = asyncio.create_task(keep_reporting(registry, lambda: self._held(key)))
        try:
            text, fingerprint = await self._read(registry)
        finally:
            reports.cancel()
            await asyncio.wait({reports})
        model = ServedModel(self.model_names[0], text, fingerprint, key.code)
        return Router(
            registry,
            model,
            self.metrics,
            self._trace,
            on_fault=self.report_fault,
            clock=self.clock,
            rng=self._rng,
        )

    def _registry_at(self, address: str) -> RegistryAccess:
        return RegistryAccess(address, self.config, self._own)

    def _held(self, key: UnitKey) -> control_pb2.ReportRouterRequest:
        """Report requests that wait for a first worker of the unit, so that pools at zero start."""
        is_drawn = any(unit.key == key and unit.share > 0 for unit in self.listed)
        return control_pb2.ReportRouterRequest(
            router_id=self._process_id, num_held=self.num_waiting if is_drawn else 0
        )

    async def _measure(self) -> None:
        """Bring the gauges up to date, once a second."""
        while True:
            self.snapshots.look(self.clock.now_s(), self.metrics, self.routers)
            self.metrics.gauges = [router.gauges() for router in self.routers]
            await asyncio.sleep(METRICS_EVERY_S)
