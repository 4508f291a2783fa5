"""All model families, by the architecture that a config.json names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.hf_config import HfConfig
from engine.models.config import ModelConfig
from engine.models.families import (
    gemma3,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from engine.models.linear.table import format_of

Family = Callable[[HfConfig], ModelConfig]
"""Reads a config.json of the family. Raises UnsupportedModelError."""
FAMILIES: dict[str, Family] = {
    "Gemma3ForCausalLM": gemma3.read,
    "LlamaForCausalLM": llama.read,
    "MistralForCausalLM": mistral.read,
    "MixtralForCausalLM": mixtral.read,
    "Qwen2ForCausalLM": qwen2.read,
    "Qwen3ForCausalLM": qwen3.read,
    "Qwen3MoeForCausalLM": qwen3_moe.read,
}


def model_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Read the content of the config.json at `source`.

    Raises UnsupportedModelError naming the architecture, or the file and the key in it.
    """
    hf = HfConfig(raw, source)
    name = (hf.list_of("architectures", str) or ["(none)"])[0]
    read = FAMILIES.get(name)
    if read is None:
        raise UnsupportedModelError(
            f"{source}: architecture {name} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return replace(read(hf), weights=format_of(hf))
