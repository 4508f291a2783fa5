"""Rank 0 of a replica as a server: engine thread, roles, services, registration.

1. `serve` starts the engine's thread, warms the engine up, mounts the role's services and
   registers. Every worker has the parts of both roles behind its services.
2. It runs until `stop`, until a drain is over, or until a part fails. If any of these comes during
   the warm-up, it opens nothing and does not wait for a step that hangs.
3. A drain takes no new work, and probes learn of it. Running requests finish, within
   `drain_timeout_s`, and routers take the last tokens. Then every pool and table is checked. It
   needs no registry.

Nothing may fail unnoticed: an error in a task or callback of these parts goes to `fail`, and ends
`serve` as an error of the engine does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from baton.clock import LoopClock
from baton.errors import OtherModelError
from baton.fleet import Role
from baton.identity.identity import open_identity
from baton.link.frames import link_name
from baton.link.worker_end import LinkServer
from baton.model_folder import find_text_files
from baton.process.interpreter import freeze_heap
from baton.v1 import control_pb2, worker_pb2
from cluster.node.pod import PodWorkers
from cluster.progress import Progress
from cluster.worker.config import WorkerConfig
from cluster.worker.live_port import live_port
from cluster.worker.rank import Rank
from cluster.worker.reports import (
    Registrar,
    WorkerCollector,
    load_fields,
    problems_of,
    worker_info,
)
from cluster.worker.service import KvFeed, ReportService
from decode_worker.role import DecodeRole
from decode_worker.service import DecodeService
from engine.api import Engine, EngineLoad
from engine.errors import EngineStoppedError
from engine.loop import EngineThread
from engine.request import EngineEvent, PrefilledEvent, TokenEvent
from kv_transfer.exporter import Exporter
from kv_transfer.lease_table import LeaseTable
from prefill_worker.role import PrefillRole
from prefill_worker.service import PrefillService

log = logging.getLogger(__name__)

_SWEEP_S = 0.1
_TAKEN_WITHIN_S = 5.0  # how long a leaving worker waits for a router that takes no tokens


class WorkerFailedError(RuntimeError):
    """A part of the worker failed; this process cannot serve any more."""


class EngineStuckError(RuntimeError):
    """A step does not end, so what it uses cannot be closed; the process must be ended."""


class Worker:
    """Owns rank 0's parts from the engine's thread upwards. Create it on a running event loop."""

    def __init__(self, config: WorkerConfig, rank: Rank) -> None:
        loop = asyncio.get_running_loop()
        clock = LoopClock(loop)
        self._config = config
        self.rank = rank
        self._loop = loop
        fingerprint = rank.model.kv_fingerprint
        assert rank.engine is not None, "rank 0 has the engine"
        self._capacity = rank.engine.capacity
        self.engine = EngineThread(rank.engine, self._from_engine, self._engine_failed)
        self.feed = KvFeed(rank.identity.incarnation)
        # Every worker has both: it always reads transfer messages for either role.
        self.exporter = Exporter(rank.transfer, fingerprint, self.engine_is_well, clock)
        self.prefill = PrefillRole(self.engine, self.exporter, self.fail)
        self.decode = DecodeRole(self.engine, fingerprint, config.cluster.decode, clock, self.fail)
        self.leases = LeaseTable(rank.transfer, fingerprint, self.decode, clock)
        self.decode.bind(self.leases)
        self.ready = asyncio.Event()
        """Set once the server listens."""
        self.left = asyncio.Event()
        """Set once it has stopped serving."""
        self._stopped = asyncio.Event()
        self._failure: Exception | None = None
        self._drain: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()  # running requests have ended, or their time is over
        # Sampled by this worker's engine: a token that runs twice counts twice.
        self._num_first_tokens = self._num_later_tokens = 0
        self._load = worker_pb2.WorkerLoad()
        self._num_quarantined_bytes = 0
        self._identity = open_identity(config.cluster.internal, "worker")
        self._links: LinkServer | None = None
        self.address = ""
        self.metrics_address = self.health_address = ""

    # --- life -----------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Serve until stopped or drained. Raises OtherModelError if the registry refuses the
        worker, WorkerFailedError, EngineStuckError, and what a step of the warm-up raises."""
        self.engine.start()
        try:
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(self._stop_engine)
                if await self._warmed_up():
                    freeze_heap()
                    await self._open(stack)
                    await self._stopped.wait()
                    await _end(self._drain)
        finally:
            self.left.set()
        if self._failure is not None:
            raise self._failure

    async def _warmed_up(self) -> bool:
        """Warm up. False: the worker must leave, and its first step may hang. Raises what a step
        raises."""
        warming = asyncio.wrap_future(self.engine.start_engine())
        stopped = self._loop.create_task(self._stopped.wait())
        ends: set[asyncio.Future[Any]] = {warming, stopped}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if warming.done():
                warming.result()
            return not self._stopped.is_set()
        finally:
            for end in ends:
                end.cancel()

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        """Serve and register until the stack is left. In a closed pod, stop at once."""
        await self._listen(stack)
        if (port := self._config.settings.health_port) is not None:
            live = live_port(self._config.host, port, lambda: self._drain is None)
            self.health_address = await stack.enter_async_context(live)
        if (port := self._config.settings.metrics_port) is not None:
            self._serve_metrics(port, stack)
        if self._config.pod is not None:
            workers, info = PodWorkers(self._config.pod), self.info()
            workers.add(info)
            stack.callback(workers.remove, info)
            if workers.is_closed:
                log.info("%s leaves: its machine is about to end", self._config.worker_id)
                self.stop()
                return
        registrar = Registrar(
            self._config.control_address,
            self.info(),
            self._beat,
            self.drain,
            self._identity,
            self._config.settings.heartbeat_s,
        )
        parts = {"registrar": registrar.run(), "sweep": self._sweep(), "load": self._follow_load()}
        for name, work in parts.items():
            stack.push_async_callback(_end, self._begin(name, work))
        self.ready.set()
        log.info("%s serves at %s", self._config.worker_id, self.address)

    def fail(self, part: str, error: BaseException) -> None:
        """End the worker because a part has failed. `serve` raises the first error."""
        if self._failure is None:
            if isinstance(error, OtherModelError):  # the registry refused it; no part failed
                self._failure = error
            else:
                log.critical("%s: %s failed", self._config.worker_id, part, exc_info=error)
                self._failure = WorkerFailedError(f"{part} failed: {error!r}")
                self._failure.__cause__ = error
        self._stopped.set()

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that the worker needs: its error fails the worker."""
        task = self._loop.create_task(work, name=name)
        task.add_done_callback(self._task_over)
        return task

    def _task_over(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(task.get_name(), error)

    async def _stop_engine(self) -> None:
        limit_s = self._config.settings.leave_timeout_s
        stopping = self._loop.run_in_executor(None, self.engine.stop)
        if not (await asyncio.wait({stopping}, timeout=limit_s))[0]:
            raise EngineStuckError(f"a step has not ended within {limit_s:g} s") from self._failure

    def stop(self) -> None:
        """Leave now; running requests are lost."""
        self._stopped.set()

    def drain(self, timeout_s: float | None = None) -> None:
        """Take no new work, finish running requests, then leave. A worker that does not serve yet
        leaves at once. Of repeated calls the shortest time counts: a spot notice shortens a drain.
        """
        if not self.ready.is_set():
            self.stop()
            return
        if timeout_s is None and self._drain is None:
            timeout_s = self._config.settings.drain_timeout_s
        if timeout_s is not None:
            self._loop.call_later(timeout_s, self._drained.set)
        if self._drain is None:
            log.info("%s drains", self._config.worker_id)
            # Not in the task, which starts later: by then new work could have come.
            self.prefill.begin_drain()
            self.decode.begin_drain()
            self._drain = self._begin("drain", self._drain_and_stop())

    async def _drain_and_stop(self) -> None:
        await self._drained.wait()
        # Time for the registry to see the drain, and for a router that lost its session to attach.
        await asyncio.sleep(2 * self._config.settings.heartbeat_s)
        if self._is_idle():
            await self._last_tokens_taken()
        # A leak gives an error exit status here. `_stop_engine` reports an engine that is stuck.
        report = await self.integrity(self._config.settings.leave_timeout_s)
        assert not report.problems, list(report.problems)
        self._stopped.set()

    async def _last_tokens_taken(self) -> None:
        """Wait until every router has its tokens, but not for one that takes none."""
        give_up_at = self._loop.time() + _TAKEN_WITHIN_S
        while not self.decode.has_sent_all or (self._links and self._links.num_unsent):
            if self._loop.time() > give_up_at:
                log.warning("%s: a router does not take its tokens", self._config.worker_id)
                return
            await asyncio.sleep(_SWEEP_S)

    async def _listen(self, stack: contextlib.AsyncExitStack) -> None:
        """Serve the links of routers and operators until the stack is left."""
        report = ReportService(self._load_now, self.drain, self.integrity, self._text_files)
        methods = {**self.feed.methods, **report.methods}
        if self._config.shape.role is not Role.DECODE:
            methods |= PrefillService(self.prefill, self.rank.model.kv_fingerprint).methods
        if self._config.shape.role is not Role.PREFILL:
            methods |= DecodeService(self.decode).methods
        name = link_name(self.rank.identity.to_proto())
        links = self._links = LinkServer(methods, self._identity, name)
        host, port = self._config.host, self._config.settings.port
        self.address = f"{host}:{await links.start(host, port)}"
        stack.push_async_callback(links.stop)

    def _serve_metrics(self, port: int, stack: contextlib.AsyncExitStack) -> None:
        collector = WorkerCollector(
            self._config.worker_id,
            self._config.pool,
            lambda: self._load,
            self._progress,
            self.decode.runs.num_orphans,
            lambda: self._num_quarantined_bytes,
            lambda: self.decode.num_other_first_tokens,
        )
        host = self._config.settings.metrics_host or self._config.host
        self.metrics_address = stack.enter_context(collector.served(host, port))
        log.info("%s serves metrics at %s", self._config.worker_id, self.metrics_address)

    # --- the engine's thread --------------------------------------------------------------------

    def _from_engine(self, events: list[EngineEvent]) -> None:
        """Runs on the engine's thread: wake the event loop once per step."""
        if events:
            self._loop.call_soon_threadsafe(self._dispatch, events)

    def _engine_failed(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self.fail, "the engine", error)

    def _dispatch(self, events: list[EngineEvent]) -> None:
        self.decode.on_events(events)
        self.prefill.on_events(events)
        self.feed.on_events(events)
        self._num_first_tokens += sum(isinstance(event, PrefilledEvent) for event in events)
        self._num_later_tokens += sum(isinstance(event, TokenEvent) for event in events)

    # --- reports --------------------------------------------------------------------------------

    def info(self) -> control_pb2.WorkerInfo:
        return worker_info(self._config, self.rank, self._capacity, self.address)

    def _beat(self) -> control_pb2.RegisterRequest:
        return control_pb2.RegisterRequest(
            progress=self._progress(), load=self._load, draining=self._drain is not None
        )

    def _progress(self) -> control_pb2.StepProgress:
        step = self._running_step()
        return control_pb2.StepProgress(
            num_steps=self.engine.num_steps,
            runnable=step.runnable,
            idle_s=step.idle_s,
            predicted_step_s=step.predicted_step_s,
        )

    def _running_step(self) -> Progress:
        # The engine runs meanwhile, so the order matters. A prediction that is read after the time
        # could be the next step's. An engine that wakes after the time was read was not in a step.
        runnable = self.engine.runnable
        predicted_step_s = self.engine.health.predicted_step_s
        idle_s = max(0.0, time.monotonic() - self.engine.last_step_at)
        return Progress(runnable, idle_s, predicted_step_s)

    def engine_is_well(self) -> bool:
        """Whether prompts here make progress: the engine has not failed, its step is not stuck by
        the registry's limits, and it has not been blocked for `stuck_after_s`. Two blocked workers
        could each hold the blocks that the other waits for."""
        limits, blocked_since = self._config.cluster.registry, self.engine.health.blocked_since
        if self.engine.error is not None or self._running_step().is_stuck(limits):
            return False
        return blocked_since is None or time.monotonic() - blocked_since < limits.stuck_after_s

    async def _follow_load(self) -> None:
        """Keep the load that heartbeats report. A stuck engine does not answer meanwhile."""
        with contextlib.suppress(EngineStoppedError):  # the engine reports its own end
            while True:
                await self._load_now()
                await asyncio.sleep(self._config.settings.heartbeat_s)

    async def _load_now(self) -> worker_pb2.WorkerLoad:
        """Return the engine's load after the running step, however long that takes."""
        load = await asyncio.wrap_future(self.engine.call(lambda e: e.load()))
        self._num_quarantined_bytes = load.num_quarantined_bytes
        self._load = worker_pb2.WorkerLoad(
            handoff_bytes_per_s=self.prefill.handoff_bytes_per_s,
            **load_fields(load, worker_pb2.WorkerLoad),
        )
        return self._load

    def _text_files(self) -> list[Path]:
        """Find the tokenizer's files. Raises ConfigError."""
        return find_text_files(self.rank.model_folder, tokenizer=self._config.cluster.tokenizer)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.decode.sweep()
            if self._drain is not None and self._is_idle():
                self._drained.set()

    def _is_idle(self) -> bool:
        return self.prefill.is_idle and self.decode.is_idle

    # --- integrity ------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Name the parts above the engine that hold something twice or for nobody."""
        return problems_of(
            {
                "prefill": self.prefill.check_integrity,
                "decode": self.decode.check_integrity,
                "exporter": self.exporter.check_integrity,
                "leases": self.leases.check_integrity,
            }
        )

    async def integrity(self, step_s: float | None = None) -> worker_pb2.CheckIntegrityResponse:
        """Run every part's checks, on every rank, and report what is held. `step_s`: how long the
        engine's running step may take. Raises EngineStoppedError, TimeoutError."""

        def check(engine: Engine) -> tuple[EngineLoad, list[str]]:
            return engine.load(), problems_of({"engine": engine.check_integrity})

        on_ranks = await self.exporter.held_handoffs.problems()
        checking = asyncio.wrap_future(self.engine.call(check))
        load, in_engine = await asyncio.wait_for(checking, step_s)
        return worker_pb2.CheckIntegrityResponse(
            problems=in_engine + on_ranks + self.problems(),
            num_open_leases=self.leases.num_open_leases(),
            num_open_handoffs=self.exporter.num_open(),
            num_blocks_in_use=load.num_blocks - load.num_free_blocks,
            num_first_tokens=self._num_first_tokens,
            num_later_tokens=self._num_later_tokens,
            **load_fields(load, worker_pb2.CheckIntegrityResponse),
        )


async def _end(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for it. `_task_over` takes its error."""
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
