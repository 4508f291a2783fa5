"""Engines by name, and what a worker asks of one before there is an `engine.api.Engine`.

An engine is a package with an `EngineBuilder`, and a line in `ENGINES` of `baton.config.engine`.
Each rank of a worker makes one builder and calls it in the order of its methods.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from baton.config.engine import ENGINES, EngineConfig
from engine.api import Engine, KvMemory, KvSink, ModelSpec

FindTokenizer = Callable[[], Path]
"""Finds the model's tokenizer.json, which grammars need. Raises ConfigError."""


@dataclass(frozen=True)
class RankPosition:
    """A process's rank in its replica. `meeting`: the host:port where rank 0 listens."""

    rank: int = 0
    size: int = 1
    meeting: str = ""
    listen_fd: int | None = None
    """In rank 0 of several ranks: the listening socket."""


@dataclass(frozen=True)
class DtypeChoice:
    dtype: str
    reason: str
    """Why, as a clause that follows the dtype and a colon."""


class LoadedModel(Protocol):
    """One rank's part of a model, its weights on the device, before it has KV memory."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def config(self) -> EngineConfig:
        """The settings, with the KV memory that all ranks' devices have room for."""

    @property
    def kv_device(self) -> str | None:
        """Where KV memory must lie, as torch names it; None: anywhere in host memory."""

    def make_engine(
        self, memory: KvMemory, sink: KvSink, find_tokenizer: FindTokenizer | None
    ) -> Engine:
        """On rank 0: make the engine, whose `close` ends the other ranks too. Called before its
        thread starts. Without a tokenizer, requests with a grammar are refused."""

    def follow(self, memory: KvMemory, sink: KvSink) -> None:
        """On ranks above 0: compute what rank 0 does until it closes. Raises TpPeerError."""


class EngineBuilder(Protocol):
    """Builds one rank's part of an engine. Every method may block."""

    def join(self, config: EngineConfig, position: RankPosition, timeout_s: float) -> None:
        """Meet the other ranks, if there are any. Raises ValueError when the engine cannot have so
        many, and TpPeerError when not all come in time."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, once all are here. Raises TpPeerError."""

    def find_model(self, model_path: str, revision: str | None) -> str:
        """Return the model's folder; fetches its hub `revision` when needed. Raises ModelError."""

    def choose_dtype(self, folder: str, config: EngineConfig) -> DtypeChoice | None:
        """Say what `dtype: auto` means on this device. None: the engine has no dtype. Raises
        ModelError."""

    def describe(self, folder: str, config: EngineConfig) -> ModelSpec:
        """Describe the model without loading it. Raises ModelError, TpPeerError."""

    def load(self, folder: str, config: EngineConfig, spec: ModelSpec) -> LoadedModel:
        """Load this rank's weights. Raises ModelError, TpPeerError, and ValueError when they do not
        fit the device."""


def engine_builder(config: EngineConfig) -> EngineBuilder:
    """Make a builder of the engine that `config.backend` names."""
    make: Callable[[], EngineBuilder] = pkgutil.resolve_name(ENGINES[config.backend])
    return make()
