"""A second engine, as small as one can be that schedules for itself.

A thread of its own computes. Requests start in the order of their arrival, and each holds all
blocks that it may ever need. So a reservation is answered when it gets its blocks, however late. An
admitted request computes its first token again. It computes the fake engine's model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

import engine.request as req
from baton.config.engine import EngineConfig
from engine.api import EngineCapacity, EngineHealth, EngineLoad, KvMemory, KvSink, ModelSpec
from engine.errors import InvalidRequestError, UnknownRequestError
from engine.run.fake_runner import FakeRunner
from engine.schedule.admission import Limits, check_spec
from kv_transfer.layout import BlockId


@dataclass
class Live:
    spec: req.RequestSpec
    max_len: int
    export: tuple[req.HandoffId, int, bytes] | None = None  # id, blocks that are there, opening
    is_reserved: bool = False
    blocks: list[BlockId] = field(default_factory=list)
    num_computed: int = 0
    first: req.SampledToken | None = None  # the one that was sent, until it is computed again


class SecondEngine:
    """`_lock` guards everything but what the thread computes."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, memory: KvMemory, sink: KvSink):
        assert all(group.window is None for group in spec.layout.groups), "no windows here"
        self._runner = FakeRunner(config, spec, memory, sink)
        self._block_size, self._groups = spec.layout.block_size, range(len(spec.layout.groups))
        self._free = [BlockId(block) for block in range(1, self._runner.num_blocks)]
        num_blocks, most_tokens = len(self._free), len(self._free) * self._block_size
        longest = min(config.max_model_len or spec.max_model_len, spec.max_model_len)
        steps = config.max_num_seqs, config.max_num_batched_tokens
        self._limits = Limits(*steps, longest, most_tokens, spec.vocab_size, spec.eos_token_ids)
        self.capacity = EngineCapacity(num_blocks, longest, most_tokens, None)
        self.health = EngineHealth()
        self._lock = threading.Condition()
        self._live: dict[req.RequestId, Live] = {}  # not ended, in the order of arrival
        self._held: dict[req.RequestId, list[BlockId]] = {}  # ended; another worker may touch these
        self._events: list[req.EngineEvent] = []
        self._num_steps, self._is_closed = 0, False
        self._error: Exception | None = None
        self._wake: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._lock.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def prepare(self, spec: req.RequestSpec) -> None:
        if spec.grammar is not None:
            raise InvalidRequestError("grammar", "this engine has no grammars")

    def add(self, spec: req.RequestSpec) -> None:
        self._take(Live(spec, check_spec(spec, self._limits, prefill_only=False)))

    def add_prefill(
        self,
        spec: req.RequestSpec,
        handoff_id: req.HandoffId,
        num_cached: int,
        opening: bytes = b"",
    ) -> None:
        export = handoff_id, num_cached // self._block_size, opening
        self._take(Live(spec, check_spec(spec, self._limits, prefill_only=True), export))

    def reserve(self, spec: req.RequestSpec) -> None:
        max_len = check_spec(spec, self._limits, prefill_only=False)
        self._take(Live(spec, max_len, is_reserved=True))

    def _take(self, live: Live) -> None:
        self.prepare(live.spec)
        with self._lock:
            if live.spec.request_id in self._live.keys() | self._held.keys():
                raise InvalidRequestError("request_id", "it runs here already")
            self._live[live.spec.request_id] = live
            self._lock.notify()

    def admit(self, request_id: req.RequestId, first: req.SampledToken) -> None:
        with self._lock:
            live = self._live.get(request_id)
            if live is None or not live.is_reserved or not live.blocks:
                raise UnknownRequestError(request_id)
            live.is_reserved, live.first = False, first
            live.num_computed = len(live.spec.token_ids) - 1
            if reason := self._finished(live, first.token_id):
                self._end(live, req.FinishedEvent(request_id, reason))
            self._lock.notify()

    def abort(self, request_id: req.RequestId) -> None:
        with self._lock:
            if live := self._live.get(request_id):
                self._end(live, req.FinishedEvent(request_id, req.FinishReason.ABORTED))

    def release(self, request_id: req.RequestId) -> None:
        self.abort(request_id)
        with self._lock:
            self._free += self._held.pop(request_id, [])
            self._lock.notify()

    def _end(self, live: Live, event: req.EngineEvent) -> None:
        """No block is given to another request before the running step has ended."""
        del self._live[live.spec.request_id]
        if live.blocks and (live.is_reserved or live.export):
            self._held[live.spec.request_id] = live.blocks
        else:
            self._free += live.blocks
        self._tell(event)
        self._lock.notify()

    def _tell(self, event: req.EngineEvent) -> None:
        self._events.append(event)
        self._wake()

    def has_work(self) -> bool:
        return bool(self._events) or self._error is not None

    def step(self) -> list[req.EngineEvent]:
        if self._error is not None:
            raise self._error
        with self._lock:
            events, self._events = self._events, []
            return events

    def load(self) -> EngineLoad:
        with self._lock:
            started = [live for live in self._live.values() if live.blocks]
            num_reserved = sum(live.is_reserved for live in started)
            return EngineLoad(
                num_waiting=len(self._live) - len(started),
                num_running=len(started) - num_reserved,
                num_reserved=num_reserved,
                num_free_blocks=len(self._free),
                num_blocks=self.capacity.num_blocks,
                num_quarantined_blocks=sum(map(len, self._held.values())),
                num_steps=self._num_steps,
            )

    def check_integrity(self) -> None:
        with self._lock:
            owned = [*self._held.values(), *(live.blocks for live in self._live.values())]
            blocks = [*self._free, *(block for each in owned for block in each)]
            assert sorted(blocks) == list(range(1, self.capacity.num_blocks + 1)), owned

    # --- its own thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                specs = {live.spec.request_id: live.spec for live in batch}
                sampled = self._runner.run(self._plan(batch), specs)
                with self._lock:
                    self._num_steps += 1
                    for live, token in zip(batch, sampled, strict=True):
                        if self._live.get(live.spec.request_id) is live:
                            self._sampled(live, token)
        except Exception as error:  # noqa: BLE001  # the thread's outermost loop: `step` raises it
            self._error = error
            self._wake()

    def _next_batch(self) -> list[Live]:
        """Wait for something to compute; empty at the end."""
        with self._lock:
            while not self._is_closed:
                self._allocate()
                if batch := [o for o in self._live.values() if o.blocks and not o.is_reserved]:
                    return batch
                self._lock.wait()
            return []

    def _allocate(self) -> None:
        for live in (live for live in self._live.values() if not live.blocks):
            num_known, size = len(live.spec.token_ids), self._block_size
            needed = -(-(num_known if live.export else live.max_len - 1) // size)
            if needed > len(self._free):
                return  # nobody is overtaken
            live.blocks, self._free = self._free[:needed], self._free[needed:]
            if live.is_reserved:
                table = tuple(live.blocks[: -(-num_known // size)])
                self._tell(
                    req.ReservedEvent(live.spec.request_id, 0, tuple(table for _ in self._groups))
                )

    def _plan(self, batch: list[Live]) -> req.StepPlan:
        openings = tuple(live.export[2] for live in batch if live.export)
        pushes = tuple(push for live in batch for push in self._pushes(live))
        return req.StepPlan(self._num_steps, tuple(map(self._seq, batch)), pushes, openings)

    def _seq(self, live: Live) -> req.ScheduledSeq:
        tables = tuple(np.array(live.blocks, np.int32) for _ in self._groups)
        new = live.spec.token_ids[live.num_computed :]
        return req.ScheduledSeq(live.spec.request_id, new, live.num_computed, tables, samples=True)

    def _pushes(self, live: Live) -> Iterator[req.BlockPush]:
        if live.export is not None:
            owed = tuple(live.blocks[live.export[1] :])
            for group in self._groups:
                yield req.BlockPush(live.export[0], group, tuple(range(len(owed))), owed)

    def _sampled(self, live: Live, token: req.SampledToken) -> None:
        """Go on from the token that was sent, whatever was computed in its place."""
        request_id, index = live.spec.request_id, live.spec.num_emitted_tokens
        (stands, live.first), is_again = (live.first or token, None), live.first is not None
        reason = None if is_again else self._finished(live, stands.token_id)
        live.num_computed = len(live.spec.token_ids)
        live.spec = replace(
            live.spec, token_ids=np.append(live.spec.token_ids, np.uint32(stands.token_id))
        )
        if live.export is not None:
            self._end(live, req.PrefilledEvent(request_id, token, 0, 0.0, 0.0, reason))
        elif reason is not None:
            self._end(live, req.TokenEvent(request_id, index, token, reason))
        else:
            self._tell(req.TokenEvent(request_id, index, token))

    def _finished(self, live: Live, token_id: int) -> req.FinishReason | None:
        num_tokens = len(live.spec.token_ids) + 1
        return live.spec.ended_by(token_id, num_tokens, live.max_len, self._limits.eos_token_ids)
