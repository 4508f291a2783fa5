"""A small deterministic model of two pools that a planner moves: time passes in even steps.

A request waits in one queue for a free prefill worker and for room at a decode worker; its prompt
is computed alone, at one rate; then it decodes beside others, whose gap between tokens grows with
their number. Workers come after a delay, are slow at first, and drain before they go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from baton.fleet import Role, WorkerState
from cluster.planner.planner import Plan
from cluster.planner.signals import (
    PoolGaps,
    PoolSignals,
    QueueSignals,
    RouterSignals,
    Signals,
    WorkerSignals,
)

TRACE = Path(__file__).parent / "azure2023_conv_10s.csv"


@dataclass(frozen=True)
class Shape:
    """What a worker can do, and how long it takes to come."""

    prefill_tokens_per_s: float = 8_000.0
    step_s: float = 0.015
    """A decode step without streams."""
    stream_s: float = 0.001
    """What each stream adds to a step."""
    kv_tokens: int = 100_000
    max_streams: int = 64
    pending_s: float = 5.0
    starting_s: float = 40.0
    cold_s: float = 20.0
    cold_factor: float = 3.0
    """How many times slower a worker is for its first `cold_s`."""


@dataclass(eq=False)
class Request:
    arrived_s: float
    prompt_tokens: int
    output_tokens: float
    prompt_left: float
    output_left: float
    first_token_s: float | None = None

    @property
    def kv_tokens(self) -> float:
        return self.prompt_tokens + self.output_tokens


@dataclass(eq=False)
class Worker:
    name: str
    came_s: float
    live_s: float
    draining: bool = False
    prompt: Request | None = None
    streams: list[Request] = field(default_factory=list)
    kv_taken: float = 0.0

    def phase(self, now_s: float) -> WorkerState:
        if self.draining:
            return WorkerState.DRAINING
        return WorkerState.LIVE if now_s >= self.live_s else WorkerState.STARTING


@dataclass
class SimulatedPool:
    """One pool's workers; `pending` holds when each of the replicas without a machine was asked."""

    role: Role
    shape: Shape
    desired: int = 0
    min_replicas: int = 0
    max_replicas: int = 16
    workers: list[Worker] = field(default_factory=list)
    pending: list[float] = field(default_factory=list)
    num_ever: int = 0

    def staying(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.draining]

    def resize(self, desired: int, now_s: float) -> None:
        """Ask for more, or let go: those without a machine first, then the youngest."""
        self.desired = desired
        while len(self.pending) + len(self.staying()) < desired:
            self.pending.append(now_s)
        while len(self.pending) + len(self.staying()) > desired:
            if self.pending:
                self.pending.pop()
            else:
                self.staying()[-1].draining = True

    def begin_with(self, replicas: int) -> None:
        """As if these had been live for long."""
        self.desired = replicas
        for _ in range(replicas):
            name = f"{self.role.value}-{self.num_ever}"
            self.workers.append(Worker(name, -1_000.0, -1_000.0))
            self.num_ever += 1

    def pass_time(self, now_s: float) -> None:
        """Machines come, and drained workers leave."""
        for asked_s in [at_s for at_s in self.pending if now_s - at_s >= self.shape.pending_s]:
            self.pending.remove(asked_s)
            name = f"{self.role.value}-{self.num_ever}"
            self.workers.append(Worker(name, now_s, now_s + self.shape.starting_s))
            self.num_ever += 1
        self.workers = [
            worker
            for worker in self.workers
            if not worker.draining or worker.streams or worker.prompt is not None
        ]

    def serving(self, now_s: float) -> list[Worker]:
        return [worker for worker in self.workers if worker.phase(now_s) is WorkerState.LIVE]

    def slowness(self, worker: Worker, now_s: float) -> float:
        is_cold = now_s - worker.live_s < self.shape.cold_s
        return self.shape.cold_factor if is_cold else 1.0

    def gap_s(self, worker: Worker, now_s: float) -> float:
        step_s = self.shape.step_s + self.shape.stream_s * len(worker.streams)
        return step_s * self.slowness(worker, now_s)


@dataclass(frozen=True)
class Arrival:
    at_s: float
    prompt_tokens: int
    output_tokens: int


class Site:
    """A prefill pool, a decode pool and the router's queue before them."""

    def __init__(self, shape: Shape, arrivals: Iterable[Arrival]) -> None:
        self.now_s = 0.0
        self.prefill = SimulatedPool(Role.PREFILL, shape)
        self.decode = SimulatedPool(Role.DECODE, shape)
        self.queue: deque[Request] = deque()
        self.done: list[Request] = []
        """Requests that had their first token, in its order."""
        self.gaps: list[tuple[float, float]] = []
        """When, and how far apart tokens were at a decode worker with streams."""
        self._recent: deque[tuple[float, float, float]] = deque()
        """The same of the last seconds, and how many tokens came so."""
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._next = next(self._arrivals, None)
        self._arrived: list[Request] = []
        self._ended: list[float] = []

    @property
    def pools(self) -> tuple[SimulatedPool, SimulatedPool]:
        return self.prefill, self.decode

    def step(self, seconds: float) -> None:
        self.now_s += seconds
        self._take_arrivals()
        for pool in self.pools:
            pool.pass_time(self.now_s)
        for worker in self.prefill.workers:
            if worker.phase(self.now_s) is not WorkerState.STARTING:
                self._compute_prompts(worker, seconds)
        for worker in self.decode.workers:
            self._decode(worker, seconds)

    def _take_arrivals(self) -> None:
        while self._next is not None and self._next.at_s <= self.now_s:
            new = self._next
            request = Request(
                new.at_s, new.prompt_tokens, new.output_tokens, new.prompt_tokens, new.output_tokens
            )
            self.queue.append(request)
            self._arrived.append(request)
            self._next = next(self._arrivals, None)

    def _compute_prompts(self, worker: Worker, seconds: float) -> None:
        rate = self.prefill.shape.prefill_tokens_per_s / self.prefill.slowness(worker, self.now_s)
        left_s = seconds
        while left_s > 0:
            if worker.prompt is None and not worker.draining:
                worker.prompt = self._place()
            if worker.prompt is None:
                return
            used_s = min(left_s, worker.prompt.prompt_left / rate)
            worker.prompt.prompt_left -= used_s * rate
            left_s -= used_s
            if worker.prompt.prompt_left <= 1e-9:
                worker.prompt.first_token_s = self.now_s - left_s
                self.done.append(worker.prompt)
                worker.prompt = None

    def _place(self) -> Request | None:
        """The queue's first request, which has reserved room where it will decode."""
        if not self.queue or (target := self._roomiest(self.queue[0])) is None:
            return None
        request = self.queue.popleft()
        target.streams.append(request)
        target.kv_taken += request.kv_tokens
        return request

    def _roomiest(self, request: Request) -> Worker | None:
        shape = self.decode.shape
        able = [
            worker
            for worker in self.decode.serving(self.now_s)
            if worker.kv_taken + request.kv_tokens <= shape.kv_tokens
            and len(worker.streams) < shape.max_streams
        ]
        return min(able, key=lambda worker: worker.kv_taken, default=None)

    def _decode(self, worker: Worker, seconds: float) -> None:
        running = [each for each in worker.streams if each.first_token_s is not None]
        if not running:
            return
        gap_s = self.decode.gap_s(worker, self.now_s)
        self.gaps.append((self.now_s, gap_s))
        self._recent.append((self.now_s, gap_s, len(running) * seconds / gap_s))
        for request in running:
            request.output_left -= seconds / gap_s
            if request.output_left <= 0:
                self._ended.append(request.output_tokens)
                worker.streams.remove(request)
                worker.kv_taken -= request.kv_tokens

    # --- what is seen of it, and what is done to it ----------------------------------------------

    def signals(self, since_s: float) -> Signals:
        """What routers and workers tell; rates are of the last `since_s`."""
        waits_s = [self.now_s - request.arrived_s for request in self.queue]
        waiting = QueueSignals(
            num_requests=len(waits_s),
            num_tokens=sum(request.prompt_tokens for request in self.queue),
            oldest_wait_s=waits_s[0] if waits_s else 0.0,
            median_wait_s=waits_s[len(waits_s) // 2] if waits_s else 0.0,
        )
        ended, self._ended = self._ended, []
        is_stopped = not any(pool.desired for pool in self.pools)
        lacks_room = bool(self.queue) and self._roomiest(self.queue[0]) is None
        arrived, self._arrived = self._arrived, []
        router = RouterSignals(
            router_id="router-0",
            measured_at_s=self.now_s,
            requests_per_s=len(arrived) / since_s,
            uncached_tokens_per_s=sum(request.prompt_tokens for request in arrived) / since_s,
            output_tokens=sum(ended) / len(ended) if ended else None,
            num_held=len(self.queue) if is_stopped else 0,
            waiting_for_prefill=QueueSignals() if lacks_room else waiting,
            waiting_for_decode=waiting if lacks_room else QueueSignals(),
            gaps=self._gaps(),
        )
        return Signals(self.now_s, tuple(map(self._pool, self.pools)), (router,))

    def _gaps(self) -> tuple[PoolGaps, ...]:
        """As `PoolFigures` tells them."""
        while self._recent and self._recent[0][0] <= self.now_s - 10.0:
            self._recent.popleft()
        total = sum(num for _, _, num in self._recent)
        so_far = 0.0
        for _, gap_s, num in sorted(self._recent, key=lambda each: each[1]):
            so_far += num
            if so_far >= 0.95 * total:
                return (PoolGaps(self.decode.role.value, round(total), gap_s),)
        return ()

    def _pool(self, pool: SimulatedPool) -> PoolSignals:
        return PoolSignals(
            name=pool.role.value,
            role=pool.role,
            desired_replicas=pool.desired,
            max_replicas=pool.max_replicas,
            min_replicas=pool.min_replicas,
            num_pending=len(pool.pending),
            workers=tuple(self._worker(pool, worker) for worker in pool.workers),
        )

    def _worker(self, pool: SimulatedPool, worker: Worker) -> WorkerSignals:
        phase = worker.phase(self.now_s)
        if phase is WorkerState.STARTING:
            return WorkerSignals(worker.name, phase)
        shape, is_prefill = pool.shape, pool.role is Role.PREFILL
        rate = shape.prefill_tokens_per_s / pool.slowness(worker, self.now_s)
        return WorkerSignals(
            worker_id=worker.name,
            state=phase,
            live_since_s=worker.live_s,
            measured_at_s=self.now_s,
            num_streams=int(worker.prompt is not None) if is_prefill else len(worker.streams),
            max_streams=shape.max_streams,
            kv_use=0.0 if is_prefill else worker.kv_taken / shape.kv_tokens,
            num_queued_tokens=round(worker.prompt.prompt_left) if worker.prompt else 0,
            prefill_tokens_per_s=rate if is_prefill else None,
            itl_s=pool.gap_s(worker, self.now_s) if worker.streams else None,
        )

    def apply(self, plan: Plan) -> None:
        for pool in self.pools:
            pool.resize(plan[pool.role.value].desired_replicas, self.now_s)
