"""Fake engines for tests: factories, an oracle, and a wire that carries pushed blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from baton.config.engine import EngineConfig, FakeEngineConfig
from baton.finish_reason import FinishReason
from engine.api import KvSink, LocalKvMemory, LocalSink, ModelSpec
from engine.request import (
    BlockPush,
    EngineEvent,
    HandoffId,
    NoCapacityEvent,
    PrefilledEvent,
    RequestId,
    RequestSpec,
    ReservedEvent,
    SamplingParams,
    TokenEvent,
)
from engine.run.build import load_model_spec
from engine.run.core import EngineCore
from engine.run.fake_engine import FakeModel
from kv_transfer.block_hash import CacheScope
from kv_transfer.layout import NULL_BLOCK, RegionLayout

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def fake_config(
    num_blocks: int = 400, window: int | None = None, **changes: object
) -> EngineConfig:
    """A step's budget below the usual `max_num_seqs` lowers it, unless it is among `changes`. Its
    seconds do not count."""
    config = EngineConfig(
        max_itl_factor=None,
        num_blocks=num_blocks,
        num_regions=4,
        backend="fake",
        fake=FakeEngineConfig(window=window, max_model_len=1024),
    )
    budget = changes.get("max_num_batched_tokens", config.max_num_batched_tokens)
    assert isinstance(budget, int)
    changes.setdefault("max_num_seqs", max(1, min(config.max_num_seqs, budget)))
    return replace(config, **changes)  # type: ignore[arg-type]


@dataclass
class FakeEngine:
    """An engine with the memory it runs on, which starts as garbage."""

    config: EngineConfig
    sink: KvSink = field(default_factory=LocalSink)
    sees_all: bool = True  # or every layer looks back a window only
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        self.model: ModelSpec = load_model_spec("", self.config)
        if not self.sees_all:
            *_, windowed = self.model.layout.groups
            only = replace(windowed, first_layer=0, num_layers=3)
            layout = replace(self.model.layout, groups=(only,))
            self.model = replace(self.model, layout=layout)
        self.region: RegionLayout = self.model.region_layout(self.config, 0, 1)
        self.memory = LocalKvMemory.of(self.region, self.config.num_regions)
        self.memory.buffer[:] = 0xA5
        found = self.tokenizer
        find = None if found is None else lambda: found
        self.core = FakeModel(self.model, self.config).make_engine(self.memory, self.sink, find)

    def block(self, layer: int, tensor: str, block_id: int) -> np.ndarray:
        """One block of one tensor of one layer, as a writable view of bytes."""
        region, inner = divmod(block_id, self.region.num_blocks)
        group = self.model.layout.groups[self.model.layout.group_of_layer(layer)]
        spec = next(t for t in group.tensors if t.name == tensor)
        num_bytes = self.region.tensor_block_bytes(spec)
        start = (
            region * self.memory.region_stride_bytes
            + self.region.tensor_offset(layer, tensor)
            + inner * num_bytes
        )
        return self.memory.buffer[start : start + num_bytes]


def reserve(core: EngineCore, spec: RequestSpec) -> ReservedEvent | NoCapacityEvent:
    """Reserve, and take the answer alone: nothing is computed for it."""
    core.reserve(spec)
    (answer,) = (e for e in core.step() if isinstance(e, ReservedEvent | NoCapacityEvent))
    return answer


def prompt(length: int, seed: int = 0, shared: int = 0) -> np.ndarray:
    """`length` tokens, of which the first `shared` are the same for every seed."""
    own = np.random.default_rng((seed, length)).integers(2, 2048, length)
    common = np.random.default_rng(12345).integers(2, 2048, 1024)
    own[:shared] = common[: min(shared, length)]
    return own.astype(np.uint32)


def spec_of(
    request_id: str,
    tokens: np.ndarray,
    sampling: SamplingParams = GREEDY,
    emitted: Sequence[int] = (),
    **changes: object,
) -> RequestSpec:
    known = np.concatenate([tokens, np.array(emitted, np.uint32)])
    spec = RequestSpec(RequestId(request_id), known, len(tokens), sampling)
    return replace(spec, **changes)  # type: ignore[arg-type]


@dataclass
class Streams:
    """Output tokens by request, checked for gaps and repetitions as they come."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, FinishReason] = field(default_factory=dict)

    def take(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, TokenEvent):
                stream = self.tokens.setdefault(event.request_id, [])
                assert event.index == len(stream), (event, len(stream))
                assert event.request_id not in self.finished, event
                stream.append(event.token.token_id)
                if event.finished is not None:
                    self.finished[event.request_id] = event.finished


def drain(core: EngineCore, streams: Streams | None = None) -> Streams:
    """Step until nothing is left to do."""
    streams = streams or Streams()
    while core.has_work():
        streams.take(core.step())
    return streams


def run(config: EngineConfig, specs: Sequence[RequestSpec], sees_all: bool = True) -> Streams:
    engine = FakeEngine(config, sees_all=sees_all).core
    for spec in specs:
        engine.add(spec)
    streams = drain(engine)
    engine.check_integrity()
    return streams


def alone(spec: RequestSpec, window: int | None = None, sees_all: bool = True) -> list[int]:
    """The oracle: the request's output on an engine that runs nothing else, without a cache."""
    prompt = spec.token_ids[: spec.num_prompt_tokens].tobytes()
    return list(_alone(prompt, spec.sampling, spec.scope, window, sees_all))


@lru_cache(maxsize=4096)
def _alone(
    token_ids: bytes,
    sampling: SamplingParams,
    scope: CacheScope,
    window: int | None,
    sees_all: bool,
) -> tuple[int, ...]:
    prompt_only = spec_of("alone", np.frombuffer(token_ids, np.uint32), sampling, scope=scope)
    config = fake_config(window=window, max_num_batched_tokens=2048, prefix_cache=False)
    return tuple(run(config, [prompt_only], sees_all).tokens["alone"])


def pool_is_whole(core: EngineCore) -> None:
    """Nothing is held, parked or lost."""
    core.check_integrity()
    load = core.load()
    assert (load.num_free_blocks, load.num_quarantined_blocks) == (load.num_blocks, 0)
    assert (load.num_waiting, load.num_running, load.num_reserved, load.num_exporting) == (0,) * 4


@dataclass
class Wire:
    """A KvSink that copies pushed blocks into another engine's memory, layer by layer."""

    source: FakeEngine = field(init=False)
    target: FakeEngine = field(init=False)
    leases: dict[HandoffId, ReservedEvent] = field(default_factory=dict)
    pushed: dict[HandoffId, list[tuple[int, int]]] = field(default_factory=dict)  # (layer, ordinal)
    calls: list[str] = field(default_factory=list)

    def open(self, lease: ReservedEvent) -> HandoffId:
        handoff = HandoffId(f"handoff {lease.request_id}")
        self.leases[handoff] = lease
        self.pushed[handoff] = []
        return handoff

    def begin(self, spec: RequestSpec) -> ReservedEvent:
        """Reserve a request at the target and prefill it at the source."""
        lease = reserve(self.target.core, spec)
        assert isinstance(lease, ReservedEvent)
        self.source.core.add_prefill(spec, self.open(lease), lease.num_cached_tokens)
        return lease

    def complete(self, lease: ReservedEvent) -> Streams:
        """Prefill what was begun, which pushes exactly what is owed, and admit it at the target."""
        events: list[EngineEvent] = []
        while self.source.core.has_work():
            events += self.source.core.step()
        (first,) = prefilled(events)
        pushed = self.pushed[HandoffId(f"handoff {lease.request_id}")]
        assert sorted(pushed) == sorted(self.owed(lease))
        self.source.core.release(lease.request_id)
        assert first.finished is None
        self.target.core.admit(lease.request_id, first.token)
        return Streams(tokens={lease.request_id: [first.token.token_id]})

    def message(self, payload: bytes) -> None:
        self.calls.append(payload.decode())

    def layer_done(self, layer: int, pushes: Sequence[BlockPush]) -> None:
        layout = self.source.model.layout
        group = layout.group_of_layer(layer)
        self.calls.append(f"layer {layer}")
        for push in pushes:
            assert push.group == group, (layer, push)
            assert {type(b) for b in push.block_ids} <= {int}, "numpy integers do not travel"
            lease = self.leases.get(push.handoff_id)
            if lease is None:
                continue  # fenced
            for ordinal, block_id in zip(push.ordinals, push.block_ids):
                target = lease.block_ids[group][ordinal]
                assert NULL_BLOCK not in (block_id, target), (push, lease)
                self.pushed[push.handoff_id].append((layer, ordinal))
                for tensor in layout.groups[group].tensors:
                    self.target.block(layer, tensor.name, target)[:] = self.source.block(
                        layer, tensor.name, block_id
                    )

    def step_done(self) -> None:
        self.calls.append("step")

    def owed(self, lease: ReservedEvent) -> list[tuple[int, int]]:
        """What the receiver lacks: every block of the lease but null ones, in every layer."""
        return [
            (layer, ordinal)
            for index, group in enumerate(self.source.model.layout.groups)
            for layer in range(group.first_layer, group.first_layer + group.num_layers)
            for ordinal, block_id in enumerate(lease.block_ids[index])
            if block_id != NULL_BLOCK
        ]


def pair(
    prefill: EngineConfig,
    decode: EngineConfig,
    sees_all: bool = True,
    tokenizer: Path | None = None,
) -> tuple[FakeEngine, FakeEngine, Wire]:
    """A prefill and a decode engine, and what lies between."""
    wire = Wire()
    wire.source = FakeEngine(prefill, wire, sees_all, tokenizer)
    wire.target = FakeEngine(decode, sees_all=sees_all, tokenizer=tokenizer)
    return wire.source, wire.target, wire


def prefilled(events: Iterable[EngineEvent]) -> list[PrefilledEvent]:
    return [event for event in events if isinstance(event, PrefilledEvent)]
