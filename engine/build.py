"""Put an engine together from its configuration: model, memory layout, runner, core."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from engine import compute_threads
from engine.api import KvMemory, KvSink, ModelSpec, Runner
from engine.config import EngineConfig
from engine.core import EngineCore
from kv_transfer.layout import RegionLayout

if TYPE_CHECKING:
    from engine.tp import TpGroup


log = logging.getLogger(__name__)


def find_model(model_path: str, revision: str | None, config: EngineConfig) -> str:
    """The model's folder, its hub `revision` fetched when needed; the fake engine reads none.
    Raises engine.models.errors.ModelError."""
    if config.backend == "fake":
        return model_path
    from engine.models.folder import resolve

    return str(resolve(model_path, revision))


def load_model_spec(model_path: str, config: EngineConfig, tp: TpGroup | None = None) -> ModelSpec:
    """Describe the model without loading it; all bytes of its weights are read once, by all ranks
    together. Raises engine.models.errors.ModelError, engine.tp.TpPeerError."""
    if config.backend == "fake":
        from engine.fake_runner import fake_model_spec

        return fake_model_spec(config)
    from engine.dtype import AUTO, choose_dtype
    from engine.models.folder import describe

    dtype = config.dtype
    if dtype == AUTO:
        choice = choose_dtype(model_path, [config.device])
        dtype = choice.dtype
        # Alone: workers elsewhere that decided otherwise would exchange no KV with this one.
        log.info("%s: computing in %s: %s", model_path, dtype, choice.reason)
    num_threads = config.num_threads or compute_threads.share(1 if tp is None else tp.size)
    return describe(model_path, config.block_size, dtype, config.max_model_len, num_threads, tp)


def region_layout(
    spec: ModelSpec, config: EngineConfig, tp_rank: int, tp_size: int
) -> RegionLayout:
    """A rank's regions, of equal size; `kv_memory_bytes` and `num_blocks` are per rank.

    Every rank has the same number of blocks. Raises ValueError when not even one block a region
    fits.
    """
    num_blocks = config.num_blocks
    if num_blocks is None:
        groups = range(len(spec.layout.groups))
        largest = max(
            sum(spec.layout.rank_block_bytes(group, rank, tp_size) for group in groups)
            for rank in range(tp_size)
        )
        per_region = config.kv_memory_bytes // largest // config.num_regions
    else:
        per_region = -(-num_blocks // config.num_regions)
    if per_region < 1:
        raise ValueError(
            f"kv_memory_bytes={config.kv_memory_bytes} holds no {config.num_regions} blocks of KV"
        )
    return RegionLayout(spec.layout, tp_rank, tp_size, per_region)


def build_runner(
    model_path: str,
    config: EngineConfig,
    spec: ModelSpec,
    memory: KvMemory,
    sink: KvSink,
    tp: TpGroup | None,
) -> Runner:
    """Load this rank's weights and bind them to its KV pool. Raises ModelError."""
    if config.backend == "fake":
        from engine.fake_runner import FakeRunner

        return FakeRunner(config, spec, memory, sink)
    from engine.sampler import Sampler
    from engine.torch_runner import load_torch_runner

    sample = Sampler(spec.eos_token_ids).sample
    return load_torch_runner(model_path, config, spec, memory, sink, tp, sample)


def build_engine(config: EngineConfig, runner: Runner, sink: KvSink) -> EngineCore:
    return EngineCore(config, runner, sink)
