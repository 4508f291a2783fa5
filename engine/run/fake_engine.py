"""Builds the fake engine: our scheduler over a `FakeRunner`. It needs neither model nor torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.config.engine import EngineConfig
from engine.api import KvMemory, KvSink, ModelSpec
from engine.engines import DtypeChoice, FindTokenizer, RankPosition
from engine.run.core import EngineCore, build_engine
from engine.run.fake_runner import FakeRunner, fake_model_spec


@dataclass(frozen=True)
class FakeModel:
    """Implements `LoadedModel`."""

    spec: ModelSpec
    config: EngineConfig
    kv_device: None = None

    def make_engine(
        self, memory: KvMemory, sink: KvSink, find_tokenizer: FindTokenizer | None = None
    ) -> EngineCore:
        runner = FakeRunner(self.config, self.spec, memory, sink)
        return build_engine(self.config, runner, sink, find_tokenizer)

    def follow(self, memory: KvMemory, sink: KvSink) -> None:
        raise AssertionError("the fake engine has one rank")


class FakeBuilder:
    """Implements `EngineBuilder`."""

    def join(self, config: EngineConfig, position: RankPosition, timeout_s: float) -> None:
        if position.size > 1:
            raise ValueError("the fake engine has one rank: set tensor_parallel to 1")

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def find_model(self, model_path: str, revision: str | None) -> str:
        return model_path

    def choose_dtype(self, folder: str, config: EngineConfig) -> DtypeChoice | None:
        return None

    def describe(self, folder: str, config: EngineConfig) -> ModelSpec:
        return fake_model_spec(config)

    def load(self, folder: str, config: EngineConfig, spec: ModelSpec) -> FakeModel:
        return FakeModel(spec, config)
