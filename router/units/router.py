"""The router of one unit: everything below its doors, composed.

Owns the table of requests. A request is known by (tenant, request id); clients attach to it and
leave it. If the client named the request, it runs on without clients for `resume_window_s`, and
its output is kept as long after its end. Otherwise it ends with its last client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections.abc import Callable, Collection
from functools import partial

from baton.clock import Clock, Timer
from baton.config.router import TenantLimits
from baton.errors import AlreadyExistsError, NotFoundError, ShuttingDownError
from baton.finish_reason import FinishReason
from baton.v1 import control_pb2
from router.fleet.fleet import Fleet
from router.fleet.fleet_links import FleetLinks, FleetReport
from router.fleet.registry import RegistryAccess, keep_reporting, watch_fleet
from router.fleet.session import RouterIdentity
from router.fleet.worker_facts import NO_BOUND
from router.index.prefix_index import PrefixIndex
from router.placement.admission import Admission
from router.placement.fairness import FairLine, RetryBudget
from router.placement.placement import Placement
from router.placement.public_prefix import PublicPrefix
from router.placement.ticket import Ticket
from router.report.figures import Counts, Figures, PoolFigures, RequestFigures
from router.report.metrics import Gauges, RouterMetrics
from router.report.recent import RecentTraffic
from router.report.traces import Trace
from router.request.client_request import ClientRequest, Key, key_of, wire_id
from router.request.output import Finished, OutputReader
from router.request.request_run import SHUTTING_DOWN, RequestRun
from router.request.run_parts import RunParts, ServedModel
from router.request.search import is_kept
from router.request.validate import NO_LIMITS, ParsedRequest, RequestLimits

log = logging.getLogger(__name__)

SEARCHES_AT_ONCE = 256  # each asks every decode worker


class Router:
    """Own the requests of this process and what they share. Lives on one event loop."""

    def __init__(
        self,
        registry: RegistryAccess,
        model: ServedModel,
        metrics: RouterMetrics,
        trace: Trace = lambda *_: "",
        *,
        on_fault: Callable[[asyncio.Task[None]], None],
        clock: Clock,
        rng: random.Random | None = None,
    ) -> None:
        """`on_fault` gets a task that has ended, and must not while the router serves."""
        config = self.config = registry.config
        self.model, self.text = model, model.text
        self.clock, self._on_fault = clock, on_fault
        self._rng = rng or random.SystemRandom()
        self._registry = registry
        self.metrics, self._trace = metrics, trace
        self.identity = RouterIdentity(f"router-{uuid.uuid4().hex[:12]}", time.time_ns())
        self._figures = Figures(self.identity.router_id, clock.now_s)
        self.index = PrefixIndex()
        self.fleet = Fleet(clock.now_s, lambda: self.admission.kick())
        self.links = FleetLinks(
            config, self.identity, self.fleet, self.index, model.name, registry.own
        )
        self.links.end_request = self._end_request
        public = PublicPrefix.of(
            config.placement.public_prefix, model.text.encode, model.text.encode_chat
        )
        self.admission = Admission(config, self.fleet, self.index, clock, random.Random(), public)
        self.watch = watch_fleet(registry, self._take_fleet, self.fleet.forget_others)
        self.parts = self._make_parts()
        self._runs: dict[Key, RequestRun] = {}
        self._timers: dict[RequestRun, Timer] = {}
        self._remembered: dict[RequestRun, int] = {}  # ended, oldest first: bytes of its output
        self._remembered_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.is_closing = False
        self._emptied = asyncio.Event()  # set when no request is known here any more
        self.replaced = asyncio.Event()
        """Set once the registry reports another model: the router is to be closed."""

    def _make_parts(self) -> RunParts:
        """Make what requests share."""
        return RunParts(
            config=self.config,
            model=self.model,
            fleet=self.fleet,
            links=self.links,
            admission=self.admission,
            searching=FairLine(
                "looked for at the decode workers",
                at_once=SEARCHES_AT_ONCE,
                max_requests=self.config.admission.max_queue + SEARCHES_AT_ONCE,
                retry_after_s=self.config.admission.overload_retry_s,
            ),
            retries=RetryBudget(self.config.retries, self.clock.now_s),
            metrics=self.metrics,
            trace=self._trace,
            counts=Counts(),
            request_figures=RequestFigures(self.clock.now_s),
            pool_figures=PoolFigures(self.clock.now_s),
            recent=RecentTraffic(self.clock.now_s),
            clock=self.clock,
            rng=self._rng,
        )

    async def start(self) -> None:
        """Begin to follow the fleet."""
        for work in (self.watch.run(), keep_reporting(self._registry, self.report)):
            task = asyncio.create_task(work)
            task.add_done_callback(self._ended_task)
            self._tasks.append(task)

    def _ended_task(self, task: asyncio.Task[None]) -> None:
        if not self.is_closing:
            self._on_fault(task)

    async def run_out(self) -> None:
        """Return when every request has ended and is forgotten; none outlives its deadline. One
        that still waits is not held for workers to come: its client asks again, another unit."""
        self.fleet.is_leaving = True
        while self._runs:
            self._emptied.clear()
            await self._emptied.wait()

    async def close(self, drain_s: float = 0.0) -> None:
        """Take nothing new, give what runs `drain_s` to end, then leave the rest to its decode
        workers: they keep it for the next router."""
        self.is_closing = True
        runs = [run for run in self._runs.values() if run.log.end is None]
        if runs and drain_s > 0:
            await asyncio.wait([asyncio.ensure_future(r.wait()) for r in runs], timeout=drain_s)
        self.leave_requests()
        for run in runs:
            await run.wait()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._runs.clear()
        self._remembered.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.links.close()

    def leave_requests(self) -> None:
        """Take nothing new, and leave what runs to its decode workers at once."""
        self.is_closing = True
        for run in list(self._runs.values()):
            run.orphan()

    # --- requests ------------------------------------------------------------------------------

    def open(self, request: ParsedRequest, tokenize_s: float) -> tuple[RequestRun, OutputReader]:
        """Begin a request, or attach to the one that runs under its id with the same body.

        The caller must `leave` with the reader. Raises AlreadyExistsError, ShuttingDownError.
        """
        run = self._runs.get(request.head.key)
        if self.is_closing:
            has_begun = run is not None
            raise ShuttingDownError(SHUTTING_DOWN, has_begun=has_begun, retry_after_s=1.0)
        if run is None:
            run = self._begin(request, tokenize_s)
        elif not request.is_same_as(run.request.body_digest, run.seed):
            raise AlreadyExistsError(
                f"request {request.head.request_id!r} was sent before with another body",
                field="request_id",
            )
        else:
            self._forget_timer(run)
        reader = run.log.reader(request.head.resume_from_index or 0)
        reader.on_cut_off = partial(self.leave, run, reader)
        return run, reader

    def _begin(self, request: ParsedRequest, tokenize_s: float) -> RequestRun:
        run = self._runs[request.head.key] = RequestRun(request, self.parts, tokenize_s)
        num_tokens = len(request.token_ids)
        own = self.metrics.of(request.head.tenant)
        self.metrics.arrivals.labels(*own).inc()
        self.metrics.prompt_tokens.labels(*own).inc(num_tokens)
        self.parts.counts.num_arrivals += 1
        self.parts.counts.prompt_tokens += num_tokens
        run.start(self._ended)
        return run

    def leave(self, run: RequestRun, reader: OutputReader) -> None:
        """A client has gone, with or without having seen the end."""
        run.log.remove(reader)
        if run.log.num_readers:
            return
        if self._runs.get(run.request.head.key) is not run:
            run.log.drop()
        elif run.log.end is None and not run.request.head.is_named:
            run.lose_clients()
        elif not self.is_closing:
            has_ended = run.log.end is not None
            self._set_timer(run, (lambda: self._forget(run)) if has_ended else run.lose_clients)

    def has(self, key: Key) -> bool:
        """Whether the request (tenant, request id) runs here, or its output is remembered."""
        return key in self._runs

    async def keeps(self, request: ClientRequest) -> bool:
        """Whether a decode worker of the unit keeps a request. Raises AlreadyExistsError,
        OverloadedError, and UnavailableError while one that may keep it has yet to answer."""
        async with self.parts.searching.turn(request.head.tenant):
            return await is_kept(request, self.links, self.config.timeouts.attach_s)

    def abort(self, tenant: str, request_id: str) -> None:
        """Abort a request that runs here. Raises NotFoundError."""
        run = self._runs.get((tenant, request_id))
        if run is None or run.log.end is not None:
            raise NotFoundError(f"no request {request_id!r} runs here", field="request_id")
        run.abort()

    def _end_request(self, named: str) -> bool:
        """Abort a request for another router. False: it does not run here."""
        try:
            self.abort(*key_of(named))
        except NotFoundError:
            return False
        return True

    def abort_everywhere(self, tenant: str, request_id: str) -> None:
        """Abort a request that may run here, or that another router may have begun."""
        self.links.cancel_everywhere(wire_id(tenant, request_id))
        with contextlib.suppress(NotFoundError):
            self.abort(tenant, request_id)

    def candidates(self, parsed: ParsedRequest, limit: int) -> list[Placement]:
        """Return where a request could go, cheapest first. Books nothing."""
        head = parsed.head
        prompt = self.admission.prompt(parsed.token_ids, head.tenant, head.cache_salt)
        ticket = Ticket((0, 0.0, 0), prompt, parsed.sampling.max_tokens, parsed.least_tokens)
        return self.admission.candidates(ticket, limit)

    def _ended(self, run: RequestRun) -> None:
        """Remember a finished request for a while, if its client may ask for it again."""
        self._forget_timer(run)
        end = run.log.end
        useful = isinstance(end, Finished) and end.reason is not FinishReason.ABORTED
        if run.request.head.is_named and useful and not self.is_closing:
            self._set_timer(run, lambda: self._forget(run))
            self._remember(run)
        else:
            self._forget(run)

    def _remember(self, run: RequestRun) -> None:
        self._remembered[run] = run.log.num_bytes
        self._remembered_bytes += self._remembered[run]
        while self._remembered_bytes > self.config.clients.max_remembered_bytes:
            self._forget(next(iter(self._remembered)))

    def _forget(self, run: RequestRun) -> None:
        self._forget_timer(run)
        self._remembered_bytes -= self._remembered.pop(run, 0)
        if self._runs.get(run.request.head.key) is run:
            del self._runs[run.request.head.key]
        if not run.log.num_readers:
            run.log.drop()
        if not self._runs:
            self._emptied.set()

    def _set_timer(self, run: RequestRun, action: Callable[[], None]) -> None:
        self._forget_timer(run)
        self._timers[run] = self.clock.call_later(self.config.clients.resume_window_s, action)

    def _forget_timer(self, run: RequestRun) -> None:
        if timer := self._timers.pop(run, None):
            timer.cancel()

    # --- the fleet -----------------------------------------------------------------------------

    def _take_fleet(self, report: FleetReport) -> None:
        if report.model_fingerprint in (b"", self.model.fingerprint):
            self.links.update(report)
        elif not self.replaced.is_set():
            log.warning("unit %r serves another model now", self.model.code)
            for run in list(self._runs.values()):
                run.lose_model()
            self.replaced.set()

    def max_model_len(self) -> int | None:
        """Return the longest prompt plus output that a decode worker takes; None: not known yet."""
        longest = self.fleet.kinds.longest_request
        return self.text.max_model_len if longest in (None, NO_BOUND) else longest

    def request_limits(self, tenant: TenantLimits = NO_LIMITS) -> RequestLimits:
        decodes = [entry.facts for entry in self.fleet if entry.facts.can_decode]
        longest = max(decodes, key=lambda facts: facts.longest_request, default=None)
        by_memory = longest is not None and longest.is_bound_by_memory
        return RequestLimits(
            max_model_len=self.max_model_len() or NO_BOUND,
            model_context=self.text.max_model_len if by_memory else None,
            tenant=tenant,
            close_objects=self.config.answers.close_objects,
        )

    def report(self) -> control_pb2.ReportRouterRequest:
        report = self._figures.report(self.parts.counts, self.admission.waits())
        pools = self.parts.pool_figures
        requests = self.parts.request_figures.report(self.num_active, pools.median_gap_s())
        report.requests.CopyFrom(requests)
        report.pools.extend(pools.report())
        return report

    def gauges(self) -> Gauges:
        return Gauges(
            num_queued=len(self.admission),
            num_active=self.num_active,
            num_index_blocks=len(self.index),
            num_degraded=self.links.num_degraded(),
            worker_states=[
                entry.state.value if entry.connected else "disconnected" for entry in self.fleet
            ],
            unit=self.model.unit,
            max_model_len=self.max_model_len(),
            kv_use={it.facts.worker_id: self.fleet.kv_use(it) for it in self.fleet}
            if self.config.metrics.vllm_names
            else {},
        )

    @property
    def runs(self) -> Collection[RequestRun]:
        """Requests that run, or whose output is kept."""
        return self._runs.values()

    @property
    def num_active(self) -> int:
        return sum(run.log.end is None for run in self._runs.values())

    def check_integrity(self) -> None:
        """Raise AssertionError when the parts disagree, or hold what no request accounts for."""
        self.fleet.check_integrity()
        self.index.check_integrity()
        assert self._timers.keys() <= set(self.runs), "a timer of a request that is forgotten"
        assert self.fleet.num_bookings <= self.num_active, (
            self.fleet.num_bookings,
            self.num_active,
        )
        assert len(self.admission) <= self.num_active, (len(self.admission), self.num_active)
        listening = sum(link.session.num_attempts for link in self.links)
        searching = self.parts.searching.num_requests * sum(1 for _ in self.links)
        assert listening <= self.num_active + searching, (listening, self.num_active, searching)
        waiting = sum(len(link.waiting) for link in self.links)
        assert waiting <= 2 * self.num_active, (waiting, self.num_active)
