"""Mistral: one window for all layers."""

from __future__ import annotations

from dataclasses import replace

from engine.hf_config import HfConfig
from engine.models.config import ModelConfig
from engine.models.families.layer_windows import one_window
from engine.models.families.llama_shaped import llama_shaped

_DEFAULTS = {
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "max_position_embeddings": 131072,
}


def read(hf: HfConfig) -> ModelConfig:
    hf = hf.over(_DEFAULTS)
    shaped = llama_shaped(hf)
    return replace(shaped, windows=one_window(hf, shaped.num_layers))
