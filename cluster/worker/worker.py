"""Rank 0 of a replica as a server: engine thread, roles, services, standing in the registry.

1. `serve` starts the engine's thread, warms the engine up, mounts the role's services, registers.
   The parts behind the services are those of both roles.
2. It runs until `stop`, until a drain is over, or until a part of it fails; one that is told any
   of these while it warms up opens nothing, and does not wait for a step that hangs.
3. A drain: no new work, health says NOT_SERVING, what runs finishes, for `drain_timeout_s` at most;
   routers take the last tokens; then every pool and table is checked. It asks nothing of the
   registry.

Nothing here may fail unnoticed: an error in a task or a callback of these parts is told to `fail`,
and ends `serve` as the engine's own does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from baton.clock import LoopClock
from baton.errors import OtherModelError
from baton.grpc_options import WORKER_MESSAGE_BYTES, accepts_pings
from baton.model_folder import find_text_files
from baton.v1 import control_pb2, worker_pb2, worker_pb2_grpc
from cluster.node.pod import PodWorkers
from cluster.pools.role_plan import Role
from cluster.registry.registry import Progress
from cluster.worker.config import WorkerConfig
from cluster.worker.kv_feed import KvFeed
from cluster.worker.rank import Rank
from cluster.worker.reports import (
    EngineCheck,
    Heartbeat,
    Registrar,
    TokenCount,
    WorkerCollector,
    problems_of,
    report,
    worker_info,
    worker_load,
)
from cluster.worker.service import WorkerService
from decode_worker.role import DecodeRole
from decode_worker.service import DecodeService
from engine.api import Engine, EngineLoad
from engine.build import build_engine
from engine.loop import EngineThread
from engine.request import EngineEvent
from engine.warm_up import warm_up
from kv_transfer.exporter import Exporter
from kv_transfer.lease_table import LeaseTable
from prefill_worker.role import PrefillRole
from prefill_worker.service import PrefillService

log = logging.getLogger(__name__)

_SWEEP_S = 0.1
_TAKEN_WITHIN_S = 5.0  # a router that takes nothing for so long is given up by a worker that leaves
# Routers ping every few seconds, also while nothing is asked: that is how a dead host is noticed.
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", WORKER_MESSAGE_BYTES),
    *accepts_pings(),
)


class WorkerFailedError(RuntimeError):
    """A part of the worker ended by an error; this process cannot serve any more."""


class EngineStuckError(RuntimeError):
    """A step does not end: what it uses cannot be closed, the process can only be ended."""


class Worker:
    """Owns rank 0's parts from the engine's thread upwards. Made on a running event loop."""

    def __init__(self, config: WorkerConfig, rank: Rank) -> None:
        loop = asyncio.get_running_loop()
        clock = LoopClock(loop)
        self._config = config
        self.rank = rank
        self._loop = loop
        fingerprint = rank.model.kv_fingerprint
        engine = build_engine(config.engine, rank.runner, rank.transfer)
        self._capacity = engine.capacity
        self.engine = EngineThread(engine, self._from_engine, self._engine_failed)
        self.feed = KvFeed(self.engine, loop)
        # Both, whatever the role: mail for either is always read, only calls are not taken.
        transfer = (rank.transfer, rank.identity, fingerprint, config.transfer)
        self.exporter = Exporter(*transfer, self._send_to_sinks, self.engine_is_well, clock)
        self.prefill = PrefillRole(self.engine, self.exporter, self.fail)
        self.decode = DecodeRole(self.engine, fingerprint, config.decode, clock, self.fail)
        self.leases = LeaseTable(*transfer, self.decode, clock)
        self.decode.bind(self.leases)
        self.ready = asyncio.Event()
        """Set once the server listens."""
        self.left = asyncio.Event()
        """Set once it serves no more."""
        self._stopped = asyncio.Event()
        self._failure: Exception | None = None
        self._drain: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()  # what ran has ended, or its time is over
        self._tokens = TokenCount()
        self._load = worker_pb2.WorkerLoad()
        self._num_quarantined_bytes = 0
        self._load_asked = False
        self._health = health_aio.HealthServicer()
        self.address = ""
        self.metrics_address = ""

    # --- life -----------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Serve until stopped or drained. Raises OtherModelError when the registry refuses the
        worker, WorkerFailedError, EngineStuckError, and whatever a step of the warm-up raises."""
        self.engine.start()
        try:
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(self._stop_engine)
                if await self._warmed_up():
                    await self._open(stack)
                    await self._stopped.wait()
                    await _end(self._drain)
        finally:
            self.left.set()
        if self._failure is not None:
            raise self._failure

    async def _warmed_up(self) -> bool:
        """False: it is to leave; its first step may hang. Raises what a step raises."""
        warming = asyncio.wrap_future(self.engine.call(lambda _: self._warm_up()))
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

    def _warm_up(self) -> None:
        """On the engine's thread, which has nothing else to do yet."""
        warm_up(self._config.engine, self.rank.runner, self.rank.transfer)

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        """Serve, and be known to; until the stack is left. At once, where the pod is closed."""
        await stack.enter_async_context(self._server())
        if (port := self._config.settings.metrics_port) is not None:
            stack.enter_context(self._metrics(port))
        if self._config.pod is not None:
            workers, info = PodWorkers(self._config.pod), self.info()
            workers.add(info)
            stack.callback(workers.remove, info)
            if workers.is_closed:
                log.info("%s leaves: its machine ends", self._config.worker_id)
                self.stop()
                return
        registrar = Registrar(
            self._config.control_address,
            self.info(),
            self._beat,
            self.drain,
            self._config.settings.heartbeat_s,
        )
        for name, work in (("registrar", registrar.run()), ("sweep", self._sweep())):
            stack.push_async_callback(_end, self._begin(name, work))
        self.ready.set()
        log.info("%s serves at %s", self._config.worker_id, self.address)

    def fail(self, part: str, error: BaseException) -> None:
        """A part has failed: the worker must end. `serve` raises the first error."""
        if self._failure is None:
            if isinstance(error, OtherModelError):  # the registry's refusal, and no part's fault
                self._failure = error
            else:
                log.critical("%s: %s failed", self._config.worker_id, part, exc_info=error)
                self._failure = WorkerFailedError(f"{part} failed: {error!r}")
                self._failure.__cause__ = error
        self._stopped.set()

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that the worker cannot do without."""
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
        """Leave now; what runs is lost."""
        self._stopped.set()

    def drain(self, timeout_s: float | None = None) -> None:
        """Take no new work, finish what runs, then leave: at once, where it does not serve yet.
        Asked again, the least time told counts: a notice, say, cuts short a drain under way."""
        if not self.ready.is_set():
            self.stop()
            return
        if timeout_s is None and self._drain is None:
            timeout_s = self._config.settings.drain_timeout_s
        if timeout_s is not None:
            self._loop.call_later(timeout_s, self._drained.set)
        if self._drain is None:
            log.info("%s drains", self._config.worker_id)
            # Now, not with the task's first turn: a worker that is idle until then is not later.
            self.prefill.begin_drain()
            self.decode.begin_drain()
            self._drain = self._begin("drain", self._drain_and_stop())

    async def _drain_and_stop(self) -> None:
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._drained.wait()
        # The registry hears of it, and a router that lost its session comes back for the end.
        await asyncio.sleep(2 * self._config.settings.heartbeat_s)
        if self._is_idle():
            await self._last_tokens_taken()
        # A leak shows here, in the exit status; an engine that does not answer, in `_stop_engine`.
        books = await self.integrity(self._config.settings.leave_timeout_s)
        assert not books.problems, list(books.problems)
        self._stopped.set()

    async def _last_tokens_taken(self) -> None:
        """Until every router has them, but for one that takes nothing."""
        give_up_at = self._loop.time() + _TAKEN_WITHIN_S
        while not self.decode.has_sent_all:
            if self._loop.time() > give_up_at:
                log.warning("%s: a router does not take its tokens", self._config.worker_id)
                return
            await asyncio.sleep(_SWEEP_S)

    @contextlib.asynccontextmanager
    async def _server(self) -> AsyncIterator[None]:
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        fingerprint = self.rank.model.kv_fingerprint
        if self._config.role is not Role.DECODE:
            worker_pb2_grpc.add_PrefillServiceServicer_to_server(
                PrefillService(self.prefill, fingerprint), server
            )
        if self._config.role is not Role.PREFILL:
            worker_pb2_grpc.add_DecodeServiceServicer_to_server(
                DecodeService(self.decode, self._config.decode.open_timeout_s), server
            )
        incarnation = self.rank.identity.incarnation
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(
            WorkerService(
                incarnation,
                self.feed,
                self._load_now,
                self.drain,
                self.integrity,
                self._text_files,
            ),
            server,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        port = server.add_insecure_port(f"{self._config.host}:{self._config.settings.port}")
        self.address = f"{self._config.host}:{port}"
        await server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        try:
            yield
        finally:
            await server.stop(grace=0.5)

    @contextlib.contextmanager
    def _metrics(self, port: int) -> Iterator[None]:
        collector = WorkerCollector(
            self._config.worker_id,
            self._config.pool,
            lambda: self._load,
            self._progress,
            self.decode.num_orphans,
            lambda: self._num_quarantined_bytes,
        )
        with collector.served(self._config.host, port) as self.metrics_address:
            log.info("%s serves metrics at %s", self._config.worker_id, self.metrics_address)
            yield

    # --- the engine's thread --------------------------------------------------------------------

    def _from_engine(self, events: list[EngineEvent]) -> None:
        """On the engine's thread: one wake-up of the event loop per step."""
        if events:
            self._loop.call_soon_threadsafe(self._dispatch, events)

    def _engine_failed(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self.fail, "the engine", error)

    def _dispatch(self, events: list[EngineEvent]) -> None:
        self.decode.on_events(events)
        self.prefill.on_events(events)
        self.feed.on_events(events)
        self._tokens.on_events(events)

    def _send_to_sinks(self, payload: bytes) -> None:
        """The prefill that it is for follows at once: one step, not one before it, takes both."""
        self.engine.post(lambda engine: engine.send_to_sinks(payload), wakes=False)

    # --- what others are told -------------------------------------------------------------------

    def info(self) -> control_pb2.WorkerInfo:
        return worker_info(self._config, self.rank, self._capacity, self.address)

    def _beat(self) -> Heartbeat:
        self._ask_load()
        return Heartbeat(self._progress(), self._load, self._drain is not None)

    def _progress(self) -> control_pb2.StepProgress:
        step = self._step_under_way()
        return control_pb2.StepProgress(
            num_steps=self.engine.num_steps,
            runnable=step.runnable,
            idle_s=step.idle_s,
            predicted_step_s=step.predicted_step_s,
        )

    def _step_under_way(self) -> Progress:
        # The engine goes on meanwhile: a prediction read after the time could be the next step's,
        # and one that wakes after the time was read was not idle in a step.
        runnable = self.engine.runnable
        predicted_step_s = self.engine.predicted_step_s
        idle_s = max(0.0, time.monotonic() - self.engine.last_step_at)
        return Progress(runnable, idle_s, predicted_step_s)

    def engine_is_well(self) -> bool:
        """Whether the prompts here are being served: it has not failed, its step under way is not
        stuck as the registry judges, and it has not been blocked for as long as one may take: what
        it lacks could be held for prompts that wait elsewhere for what is held for these."""
        judge, blocked_since = self._config.registry, self.engine.blocked_since
        if self.engine.error is not None or self._step_under_way().is_stuck(judge):
            return False
        return blocked_since is None or time.monotonic() - blocked_since < judge.stuck_after_s

    def _ask_load(self) -> None:
        """Have the engine's thread tell its load between two steps; a stuck one tells nothing."""
        if self._load_asked:
            return
        self._load_asked = True

        def ask(engine: Engine) -> None:
            self._loop.call_soon_threadsafe(self._take_load, engine.load())

        self.engine.post(ask)

    def _take_load(self, load: EngineLoad) -> None:
        self._load_asked = False
        self._num_quarantined_bytes = load.num_quarantined_bytes
        self._load = worker_load(load, self.prefill.handoff_bytes_per_s)

    async def _load_now(self) -> worker_pb2.WorkerLoad:
        """As the engine's thread tells it between two steps; waits for as long as a step takes."""
        self._take_load(await asyncio.wrap_future(self.engine.call(lambda e: e.load())))
        return self._load

    def _text_files(self) -> list[Path]:
        """Raises ConfigError."""
        return find_text_files(self.rank.model_folder, tokenizer=self._config.tokenizer)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.decode.sweep()
            if self._drain is not None and self._is_idle():
                self._drained.set()

    def _is_idle(self) -> bool:
        return self.prefill.is_idle and self.decode.is_idle

    # --- integrity ------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError when a part above the engine holds something twice or for nobody."""
        problems = problems_of(self._checks())
        assert not problems, problems

    def _checks(self) -> dict[str, Callable[[], None]]:
        return {
            "prefill": self.prefill.check_integrity,
            "decode": self.decode.check_integrity,
            "exporter": self.exporter.check_integrity,
            "leases": self.leases.check_integrity,
        }

    async def integrity(self, step_s: float | None = None) -> worker_pb2.CheckIntegrityResponse:
        """What every part's check finds, on every rank, and what is held. `step_s`: how long the
        engine's step under way may take. Raises EngineStoppedError, TimeoutError."""
        on_ranks = await self.exporter.held_handoffs.problems()
        engine = self.engine.call(EngineCheck.of)
        books = await asyncio.wait_for(asyncio.wrap_future(engine), step_s)
        return report(
            books,
            on_ranks + problems_of(self._checks()),
            self._tokens,
            self.leases.num_open_leases(),
            self.exporter.num_open(),
        )


async def _end(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for it; what it raises is told by `_task_over`."""
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
