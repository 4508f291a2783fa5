"""Put an engine together from its configuration: model, memory layout, runner, core."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from baton.config.engine import AUTO, EngineConfig
from engine.api import (
    KvMemory,
    KvSink,
    LocalDeviceMemory,
    LocalKvMemory,
    LocalSink,
    ModelSpec,
    Runner,
)
from engine.run import compute_threads
from engine.run.core import EngineCore
from engine.sampling.constraints import GrammarCompiler

if TYPE_CHECKING:
    from engine.models.decoder import Decoder
    from engine.run.tp import TpGroup

log = logging.getLogger(__name__)


def find_model(model_path: str, revision: str | None, config: EngineConfig) -> str:
    """The model's folder; fetches its hub `revision` when needed. The fake engine reads none.

    Raises engine.errors.ModelError.
    """
    if config.backend == "fake":
        return model_path
    from engine.models.checkpoint.folder import resolve

    return str(resolve(model_path, revision))


def load_model_spec(model_path: str, config: EngineConfig, tp: TpGroup | None = None) -> ModelSpec:
    """Describe the model without loading it. All ranks together read all bytes of its weights once.

    Raises engine.errors.ModelError, engine.run.tp.TpPeerError.
    """
    if config.backend == "fake":
        from engine.run.fake_runner import fake_model_spec

        return fake_model_spec(config)
    from engine.models.checkpoint.folder import describe
    from engine.run.auto_choice import choose_dtype, device_of

    dtype: str = config.dtype
    if dtype == AUTO:
        choice = choose_dtype(model_path, [device_of(config).type])
        dtype = choice.dtype
        # Alone: workers elsewhere that decided otherwise would exchange no KV with this one.
        log.info("%s: computing in %s: %s", model_path, dtype, choice.reason)
    num_threads = config.num_threads or compute_threads.share(1 if tp is None else tp.size)
    return describe(model_path, config, dtype, num_threads, tp)


def load_decoder(
    model_path: str, config: EngineConfig, spec: ModelSpec, tp: TpGroup | None
) -> Decoder | None:
    """This rank's part of the model with its weights on the device; None for the fake engine.

    Raises ModelError, TpPeerError, and ValueError if the weights do not fit the device.
    """
    if config.backend == "fake":
        return None
    from engine.run.torch_runner import load_torch_decoder

    return load_torch_decoder(model_path, config, spec, tp)


def with_kv_memory(
    config: EngineConfig, spec: ModelSpec, decoder: Decoder | None, tp: TpGroup | None
) -> EngineConfig:
    """Fill in the KV memory that the device has room for, unless it is set; see `kv_sizing`.

    Raises TpPeerError, and ValueError with how much is missing.
    """
    if decoder is None:
        return config
    from engine.run.kv_sizing import with_sized_kv

    return with_sized_kv(config, spec, decoder, tp)


def build_runner(
    decoder: Decoder | None,
    config: EngineConfig,
    spec: ModelSpec,
    memory: KvMemory,
    sink: KvSink,
    tp: TpGroup | None,
) -> Runner:
    """Bind the result of `load_decoder` to this rank's KV pool."""
    if decoder is None:
        from engine.run.fake_runner import FakeRunner

        return FakeRunner(config, spec, memory, sink)
    from engine.run.torch_runner import TorchRunner
    from engine.sampling.sampler import Sampler

    return TorchRunner(spec, decoder, memory, sink, Sampler(spec.eos_token_ids).sample, tp)


def build_engine(
    config: EngineConfig,
    runner: Runner,
    sink: KvSink,
    find_tokenizer: Callable[[], Path] | None = None,
) -> EngineCore:
    """`find_tokenizer`: the tokenizer.json, which grammars need; it may raise ConfigError."""
    model, compiler = runner.model, None
    if find_tokenizer is not None:
        compiler = GrammarCompiler(find_tokenizer, model.vocab_size, model.eos_token_ids)
    return EngineCore(config, runner, sink, compiler=compiler)


def lone_engine(
    decoder: Decoder | None,
    config: EngineConfig,
    spec: ModelSpec,
    find_tokenizer: Callable[[], Path] | None = None,
) -> EngineCore:
    """An engine of one rank with its own KV memory, which hands nothing over."""
    config = with_kv_memory(config, spec, decoder, None)
    layout, sink = spec.region_layout(config, 0, 1), LocalSink()
    memory: KvMemory = (
        LocalKvMemory.of(layout, config.num_regions)
        if decoder is None
        else LocalDeviceMemory(layout, config.num_regions, str(decoder.device))
    )
    runner = build_runner(decoder, config, spec, memory, sink, None)
    return build_engine(config, runner, sink, find_tokenizer)


def load_lone_engine(model_path: str, config: EngineConfig) -> EngineCore:
    """`lone_engine` of a model's folder. Raises ModelError, ValueError."""
    spec = load_model_spec(model_path, config)
    decoder = load_decoder(model_path, config, spec, None)
    return lone_engine(decoder, config, spec, lambda: Path(model_path) / "tokenizer.json")
