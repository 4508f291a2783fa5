"""An engine of one rank that hands nothing over."""

from __future__ import annotations

from pathlib import Path

from baton.config.engine import EngineConfig
from engine.api import Engine, KvMemory, LocalDeviceMemory, LocalKvMemory, LocalSink, ModelSpec
from engine.engines import FindTokenizer, LoadedModel, engine_builder


def load_model_spec(model_path: str, config: EngineConfig) -> ModelSpec:
    """Describe a model in a folder without loading it. Raises ModelError."""
    return engine_builder(config).describe(model_path, config)


def lone_engine(loaded: LoadedModel, find_tokenizer: FindTokenizer | None = None) -> Engine:
    """Make an engine with its own KV memory."""
    config, device = loaded.config, loaded.kv_device
    layout, sink = loaded.spec.region_layout(config, 0, 1), LocalSink()
    memory: KvMemory = (
        LocalKvMemory.of(layout, config.num_regions)
        if device is None
        else LocalDeviceMemory(layout, config.num_regions, device)
    )
    return loaded.make_engine(memory, sink, find_tokenizer)


def load_lone_engine(model_path: str, config: EngineConfig) -> Engine:
    """Make a `lone_engine` of a model's folder. Raises ModelError, ValueError."""
    builder = engine_builder(config)
    loaded = builder.load(model_path, config, builder.describe(model_path, config))
    return lone_engine(loaded, lambda: Path(model_path) / "tokenizer.json")
