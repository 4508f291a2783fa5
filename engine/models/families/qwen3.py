"""Qwen3: norms over each head's query and key; windows in the upper layers."""

from __future__ import annotations

from dataclasses import replace

from engine.hf_config import HfConfig
from engine.models.config import ModelConfig
from engine.models.families.layer_windows import windows_of_upper_layers
from engine.models.families.llama_shaped import llama_shaped

_DEFAULTS = {"sliding_window": 4096, "head_dim": 128, "num_key_value_heads": 32}


def read(hf: HfConfig) -> ModelConfig:
    hf = hf.over(_DEFAULTS)
    shaped = llama_shaped(hf)
    windows = windows_of_upper_layers(hf, shaped.num_layers)
    return replace(shaped, windows=windows, qk_norm=True)
