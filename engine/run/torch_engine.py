"""Builds one rank of the torch engine: our scheduler over a `TorchRunner`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from baton.config.engine import AUTO, EngineConfig
from engine.api import KvMemory, KvSink, ModelSpec
from engine.engines import DtypeChoice, FindTokenizer, RankPosition
from engine.models.checkpoint import folder as model_folder
from engine.models.decoder import Decoder
from engine.run import compute_threads
from engine.run.auto_choice import choose_dtype, device_of
from engine.run.core import EngineCore, build_engine
from engine.run.kv_sizing import with_sized_kv
from engine.run.torch_runner import TorchRunner, load_torch_decoder
from engine.run.tp import TpGroup
from engine.sampling.sampler import Sampler

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TorchModel:
    """Implements `LoadedModel`. `config` has the KV memory already."""

    spec: ModelSpec
    config: EngineConfig
    decoder: Decoder
    tp: TpGroup | None = None

    @classmethod
    def sized(
        cls, spec: ModelSpec, config: EngineConfig, decoder: Decoder, tp: TpGroup | None = None
    ) -> TorchModel:
        """Give KV what the device has room for. Raises TpPeerError, ValueError."""
        return cls(spec, with_sized_kv(config, spec, decoder, tp), decoder, tp)

    @property
    def kv_device(self) -> str | None:
        return str(self.decoder.device)

    def make_runner(self, memory: KvMemory, sink: KvSink) -> TorchRunner:
        sample = Sampler(self.spec.eos_token_ids).sample
        return TorchRunner(self.spec, self.decoder, memory, sink, sample, self.tp)

    def make_engine(
        self, memory: KvMemory, sink: KvSink, find_tokenizer: FindTokenizer | None = None
    ) -> EngineCore:
        return build_engine(self.config, self.make_runner(memory, sink), sink, find_tokenizer)

    def follow(self, memory: KvMemory, sink: KvSink) -> None:
        self.make_runner(memory, sink).follow()


class TorchBuilder:
    """Implements `EngineBuilder`. Ranks meet over torch.distributed."""

    def __init__(self) -> None:
        self._tp: TpGroup | None = None

    def join(self, config: EngineConfig, position: RankPosition, timeout_s: float) -> None:
        if position.size > 1:
            self._tp = TpGroup.join(position, device_of(config).type, timeout_s)

    def gather(self, value: Any) -> list[Any]:
        return [value] if self._tp is None else self._tp.gather(value)

    def find_model(self, model_path: str, revision: str | None) -> str:
        return str(model_folder.resolve(model_path, revision))

    def choose_dtype(self, folder: str, config: EngineConfig) -> DtypeChoice | None:
        return choose_dtype(folder, [device_of(config).type])

    def describe(self, folder: str, config: EngineConfig) -> ModelSpec:
        return describe(folder, config, self._tp)

    def load(self, folder: str, config: EngineConfig, spec: ModelSpec) -> TorchModel:
        decoder = load_torch_decoder(folder, config, spec, self._tp)
        return TorchModel.sized(spec, config, decoder, self._tp)


def describe(folder: str, config: EngineConfig, tp: TpGroup | None = None) -> ModelSpec:
    """Describe the model. All ranks together read all bytes of its weights once."""
    dtype: str = config.dtype
    if dtype == AUTO:
        choice = choose_dtype(folder, [device_of(config).type])
        dtype = choice.dtype
        # Alone: workers elsewhere that decided otherwise would exchange no KV with this one.
        log.info("%s: computing in %s: %s", folder, dtype, choice.reason)
    num_threads = config.num_threads or compute_threads.share(1 if tp is None else tp.size)
    return model_folder.describe(folder, config, dtype, num_threads, tp)
