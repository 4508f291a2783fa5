"""The engines that the suite runs, on threads as in a worker, and what carries KV between two."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from baton.config.engine import EngineConfig, FakeEngineConfig
from engine.api import Engine, KvMemory, KvSink, LocalKvMemory, ModelSpec
from engine.engines import FindTokenizer, LoadedModel, engine_builder
from engine.loop import EngineThread
from engine.request import (
    BlockPush,
    EngineEvent,
    RequestId,
    RequestSpec,
    ReservedEvent,
    SamplingParams,
    TokenEvent,
)
from engine.run.build import lone_engine
from engine.run.fake_engine import FakeBuilder, FakeModel
from engine.run.fake_runner import fake_model_spec
from tests.engine.conformance.second_engine import SecondEngine

CALL_S = 20.0  # a call that takes longer hangs

T = TypeVar("T")

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
NUM_BLOCKS = 25  # of 16 tokens, the null block included


@dataclass
class Sink:
    """A `KvSink` that writes what is pushed into the receiver's memory."""

    calls: list[object] = field(default_factory=list)
    pushed: list[tuple[int, int]] = field(default_factory=list)  # (layer, ordinal)
    copy: Callable[[int, BlockPush], None] = lambda layer, push: None

    def message(self, payload: bytes) -> None:
        self.calls.append(payload)

    def layer_done(self, layer: int, pushes: Sequence[BlockPush]) -> None:
        for push in pushes:
            self.calls.append(push.handoff_id)
            self.pushed += [(layer, ordinal) for ordinal in push.ordinals]
            self.copy(layer, push)

    def step_done(self) -> None:
        pass


class Running:
    """An engine on its thread, and the events that it has sent."""

    def __init__(
        self, loaded: LoadedModel, change: Callable[[Engine], None], wait_s: float
    ) -> None:
        spec, config, self.wait_s = loaded.spec, loaded.config, wait_s
        self.spec, self.sink = spec, Sink()
        self.region = spec.region_layout(config, 0, 1)
        self.memory = LocalKvMemory.of(self.region, config.num_regions)
        self.memory.buffer[:] = 0xA5
        self.engine = loaded.make_engine(self.memory, self.sink, None)
        change(self.engine)
        self.events: list[EngineEvent] = []
        self.fatal: Future[BaseException] = Future()
        self._changed = threading.Condition()
        self.thread = EngineThread(self.engine, self._take, self.fatal.set_result)
        self.thread.start()
        self.thread.start_engine().result(CALL_S)

    def _take(self, events: list[EngineEvent]) -> None:
        with self._changed:
            self.events += events
            self._changed.notify()

    def call(self, function: Callable[[Engine], T]) -> T:
        return self.thread.call(function).result(CALL_S)

    def events_of(self, request_id: str, *kinds: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kinds) and e.request_id == request_id]

    def until(self, request_id: str, *kinds: type, num: int = 1) -> Any:
        """The `num`th event of these kinds, once it has come."""
        self.until_true(lambda: len(self.events_of(request_id, *kinds)) >= num)
        return self.events_of(request_id, *kinds)[num - 1]

    def until_true(self, happened: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(happened, self.wait_s), self.events

    def idle(self) -> None:
        """Return when every command has run and every event has come."""
        self.call(lambda engine: None)
        self.call(lambda engine: None)  # the first one's step is over

    def block(self, layer: int, tensor: str, block_id: int) -> np.ndarray:
        """A block of one tensor of one layer, as a writable view of bytes."""
        region, inner = divmod(block_id, self.region.num_blocks)
        layout = self.spec.layout
        group = layout.groups[layout.group_of_layer(layer)]
        spec = next(each for each in group.tensors if each.name == tensor)
        num_bytes = self.region.tensor_block_bytes(spec)
        start = region * self.memory.region_stride_bytes + self.region.tensor_offset(layer, tensor)
        start += inner * num_bytes
        return self.memory.buffer[start : start + num_bytes]

    def pushes_to(self, other: Running, lease: ReservedEvent) -> None:
        """Write what is pushed into the blocks of the other's reservation."""

        def copy(layer: int, push: BlockPush) -> None:
            group = self.spec.layout.groups[push.group]
            for ordinal, block_id in zip(push.ordinals, push.block_ids, strict=True):
                target = lease.block_ids[push.group][ordinal]
                for tensor in group.tensors:
                    there = other.block(layer, tensor.name, target)
                    there[:] = self.block(layer, tensor.name, block_id)

        self.sink.copy = copy

    def check_whole(self) -> None:
        """Nothing is held or lost."""
        self.call(lambda engine: engine.check_integrity())
        load = self.call(lambda engine: engine.load())
        assert load.num_free_blocks == load.num_blocks, load
        held = load.num_waiting, load.num_running, load.num_reserved, load.num_exporting
        assert (*held, load.num_quarantined_blocks) == (0,) * 5, load

    def close(self) -> None:
        self.thread.stop()
        self.engine.close()


@dataclass(frozen=True)
class Tenant:
    """An engine of the suite. `change` is applied to each one that is made; mutations use it."""

    name: str
    load: Callable[[], LoadedModel]
    change: Callable[[Engine], None] = lambda engine: None
    wait_s: float = 20.0

    @contextmanager
    def running(self, num: int = 1) -> Iterator[tuple[Running, ...]]:
        made = [Running(self.load(), self.change, self.wait_s) for _ in range(num)]
        try:
            yield tuple(made)
        finally:
            for one in made:
                one.close()

    def answer(self, spec: RequestSpec) -> list[int]:
        """The tokens of a request that runs alone on our own engine. It shares the model, so no
        other engine may run meanwhile."""
        loaded = self.load()
        if isinstance(loaded, SecondModel):
            loaded = FakeModel(loaded.spec, loaded.config)
        engine = lone_engine(loaded)
        engine.add(spec)
        tokens: list[int] = []
        while engine.has_work():
            tokens += [e.token.token_id for e in engine.step() if isinstance(e, TokenEvent)]
        engine.close()
        return tokens


class SecondBuilder(FakeBuilder):
    """Implements `engine.engines.EngineBuilder`."""

    def load(self, folder: str, config: EngineConfig, spec: ModelSpec) -> FakeModel:
        return SecondModel(spec, config)


@dataclass(frozen=True)
class SecondModel(FakeModel):
    def make_engine(  # type: ignore[override]
        self, memory: KvMemory, sink: KvSink, find_tokenizer: FindTokenizer | None = None
    ) -> SecondEngine:
        return SecondEngine(self.config, self.spec, memory, sink)


CONFIG = EngineConfig(
    backend="fake",
    num_blocks=NUM_BLOCKS,
    num_regions=1,
    dtype="float32",
    device="cpu",
    num_threads=1,
    fake=FakeEngineConfig(vocab_size=300, max_model_len=1024),
)


@cache
def torch_model() -> LoadedModel:
    from tests.engine import checkpoints  # transformers, which the others do without

    with tempfile.TemporaryDirectory() as folder:
        checkpoints.save("qwen3", Path(folder))
        builder, config = engine_builder(replace(CONFIG, backend="torch")), CONFIG
        return builder.load(folder, config, builder.describe(folder, config))


TENANTS = (
    Tenant("torch", torch_model),
    Tenant("fake", lambda: FakeModel(fake_model_spec(CONFIG), CONFIG)),
    Tenant("second", lambda: SecondModel(fake_model_spec(CONFIG), CONFIG)),
)


def request(name: str, num_tokens: int, sampling: SamplingParams = GREEDY) -> RequestSpec:
    """A prompt that follows from its name and shares no block with others."""
    drawn = np.random.default_rng(list(name.encode())).integers(2, 300, num_tokens)
    return RequestSpec(RequestId(name), drawn.astype(np.uint32), num_tokens, sampling)
