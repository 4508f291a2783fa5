"""Random Qwen3-shaped checkpoints to measure on; made once into a cache folder, never committed."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from bench import random_model
from bench.random_model import Shape

SHAPES = {name: random_model.SHAPES[name] for name in ("0.1B", "0.6B")}


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "baton" / "bench-models"


def tensors(shape: Shape) -> dict[str, torch.Tensor]:
    """Normal weights with the usual scale, in bf16; same values in every run."""
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator) / math.sqrt(columns)
        return values.bfloat16()

    hidden, heads, dim = shape.hidden_size, shape.num_attention_heads, shape.head_dim
    kv = shape.num_key_value_heads * dim
    found = {
        "model.embed_tokens.weight": random(shape.vocab_size, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name in ("q_norm", "k_norm"):
            found[f"{prefix}self_attn.{name}.weight"] = torch.ones(dim, dtype=torch.bfloat16)
        found |= {
            f"{prefix}self_attn.q_proj.weight": random(heads * dim, hidden),
            f"{prefix}self_attn.k_proj.weight": random(kv, hidden),
            f"{prefix}self_attn.v_proj.weight": random(kv, hidden),
            f"{prefix}self_attn.o_proj.weight": random(hidden, heads * dim),
            f"{prefix}mlp.gate_proj.weight": random(shape.intermediate_size, hidden),
            f"{prefix}mlp.up_proj.weight": random(shape.intermediate_size, hidden),
            f"{prefix}mlp.down_proj.weight": random(hidden, shape.intermediate_size),
        }
    return found


def save_tokenizer(shape: Shape, folder: Path) -> None:
    """A tokenizer with one word per token id, so that a router can serve the checkpoint."""
    words = {f"w{token_id}": token_id for token_id in range(shape.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def make(name: str) -> Path:
    """Folder of the checkpoint called `name`; written on first use."""
    folder = cache_folder() / f"qwen3-{name}"
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[name]
    save_tokenizer(shape, folder)
    save_file(tensors(shape), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.hf_config(), indent=1))
    return folder
