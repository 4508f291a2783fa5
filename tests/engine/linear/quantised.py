"""Checkpoints with 8-bit weights, and transformers on what these weights mean as their oracle."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.models.linear.int8 import quantise
from tests.engine import checkpoints
from tests.engine.linear.suite import MODULE, int8_meant, int8_tensors

_FILE = "model.safetensors"
_PRODUCT = re.compile(r"(_proj|\.w[123]|lm_head)\.weight$")


def save(
    family: str, folder: Path, layout: str, group: int | None, ignore: tuple[str, ...]
) -> transformers.PreTrainedModel:
    """A checkpoint as compressed-tensors writes it. `ignore`: endings of modules' names."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group" if group else "channel", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    settings = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": scheme},
        "ignore": [f"re:.*{name}$" for name in ignore],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
    checkpoints.save(family, folder)
    tensors, meant = load_file(folder / _FILE), {}
    for name in [name for name in tensors if _PRODUCT.search(name)]:
        module = name.removesuffix(".weight")
        if not module.endswith(ignore):
            weight = tensors.pop(name)
            found = int8_tensors(weight, layout, group, torch.float32)
            tensors |= {key.replace(MODULE, module, 1): found[key] for key in found}
            meant[name] = int8_meant(weight, group, torch.float32)
    oracle = oracle_of(folder, lambda name, weight: meant.get(name, weight))
    save_file(tensors, folder / _FILE, {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    return oracle


def at_load(family: str, folder: Path) -> transformers.PreTrainedModel:
    """A checkpoint of floats, and the oracle of `engine.quantization: int8`."""
    checkpoints.save(family, folder)
    return oracle_of(
        folder,
        lambda name, weight: quantise(weight).dequantised() if _PRODUCT.search(name) else weight,
    )


def oracle_of(
    folder: Path, meant: Callable[[str, torch.Tensor], torch.Tensor]
) -> transformers.PreTrainedModel:
    """transformers on the folder's checkpoint, each weight replaced by what it means. A head that
    shares the embedding gets a weight of its own, which is quantised alone."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / _FILE)
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    beside = folder.with_name(f"{folder.name}-oracle")
    beside.mkdir()
    (beside / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    wide = {name: meant(name, tensor).contiguous() for name, tensor in tensors.items()}
    save_file(wide, beside / _FILE, {"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(
        beside, dtype=torch.float32, attn_implementation="eager"
    ).eval()
