"""Random models: weights are drawn as the loader asks for them.

`random_model` makes one in memory. `saved` writes one into a cache folder, never committed.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine.api import ModelSpec
from engine.kernels.native.native_kernels import pick_kernels
from engine.kernels.paged_kv import TORCH_DTYPES
from engine.kernels.protocol import Kernels
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.families.table import model_config
from engine.models.loading import WeightLoader
from engine.models.roofline import RankCost
from engine.models.sharding import shard_of
from engine.run.auto_choice import cpu_has_bf16

WeightOf = Callable[[str, tuple[int, ...], torch.Generator], torch.Tensor]
"""A tensor's name and shape, and where its numbers come from -> the tensor."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one Qwen3 decoder, under the names of a Hugging Face config."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6

    def hf_config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "rope_theta": 1000000.0,
            "attention_bias": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            **asdict(self),
        }

    def cost(self, dtype: str) -> RankCost:
        return RankCost(model_config(self.hf_config()), dtype)


SHAPES = {
    "tiny": Shape(64, 96, 2, 4, 2, 32, 512),
    "0.1B": Shape(640, 2048, 14, 10, 5, 64, 32768),
    "0.6B": Shape(1024, 3072, 28, 16, 8, 128, 151936),
    "8B": Shape(4096, 12288, 36, 32, 8, 128, 151936, tie_word_embeddings=False),
}
ON_DISK = ("0.1B", "0.6B")
"""Shapes that are measured beside transformers, which reads a folder."""


def usual_dtype() -> str:
    """Return what engines compute in on this CPU: bf16 where it has instructions for it."""
    return "bfloat16" if cpu_has_bf16() else "float32"


def usual_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Normal numbers at the usual scale; norms are 1."""
    if len(shape) == 1:
        return torch.ones(shape, device=generator.device)
    numbers = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16)
    return numbers.mul_(shape[-1] ** -0.5)


class RandomTensors:
    """Every tensor of a model, in place of a checkpoint; implements `TensorSource`.

    A tensor's numbers depend on its name, its shape and the device that draws them.
    """

    def __init__(self, device: torch.device, weight_of: WeightOf) -> None:
        self._device = device
        self._weight_of = weight_of

    def read(
        self, name: str, shape: tuple[int, ...], *parts: slice, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        assert dtype is None, "random weights are of floating-point numbers"
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return self._weight_of(name, shape, generator)[parts or (slice(None),)]

    def source_of(self, name: str) -> str:
        return "random tensors"

    def ignore(self, name: str) -> None:
        pass

    def check_all_read(self) -> None:
        pass


def random_model(
    hf: Mapping[str, Any],
    dtype: str,
    device: torch.device,
    *,
    block_size: int = 16,
    weight_of: WeightOf = usual_weight,
    drawn_on: torch.device | None = None,
    kernels: Kernels | None = None,
) -> tuple[ModelSpec, Decoder]:
    """Make the model of a Hugging Face config. `drawn_on`: None, the device itself; `kernels`:
    None, those that serve the device."""
    config: ModelConfig = model_config(hf)
    shard, torch_dtype = shard_of(config, 0, 1), TORCH_DTYPES[dtype]
    tensors = RandomTensors(drawn_on or device, weight_of)
    weights = WeightLoader(tensors, config, shard, torch_dtype, device).load()
    decoder = Decoder(config, weights, shard, kernels or pick_kernels(device, torch_dtype), None)
    spec = ModelSpec(
        name="random",
        layout=config.kv_layout(block_size, dtype),
        kv_fingerprint=b"random",
        model_fingerprint=b"random",
        vocab_size=config.vocab_size,
        max_model_len=config.longest_context,
        eos_token_ids=frozenset(),
    )
    return spec, decoder


# --- on disk --------------------------------------------------------------------------------------


def saved(name: str) -> Path:
    """Return the folder of the checkpoint with the shape `name`; written on first use."""
    from safetensors.torch import save_file

    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "baton" / "bench-models" / f"qwen3-{name}"
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}

    def keep(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        tensors[name] = usual_weight(name, shape, generator).bfloat16()
        return tensors[name]

    shape = SHAPES[name]
    random_model(shape.hf_config(), "bfloat16", torch.device("cpu"), weight_of=keep)
    _save_tokenizer(shape, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.hf_config(), indent=1))
    return folder


def _save_tokenizer(shape: Shape, folder: Path) -> None:
    """Save a tokenizer with one word per token id, so that a router can serve the checkpoint."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{token_id}": token_id for token_id in range(shape.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
