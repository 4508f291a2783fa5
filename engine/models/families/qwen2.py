"""Qwen2: biases on queries, keys and values; windows in the upper layers."""

from __future__ import annotations

from dataclasses import replace

from engine.hf_config import HfConfig
from engine.models.config import ModelConfig
from engine.models.families.layer_windows import windows_of_upper_layers
from engine.models.families.llama_shaped import llama_shaped


def read(hf: HfConfig) -> ModelConfig:
    hf = hf.over({"sliding_window": 4096})
    shaped = llama_shaped(hf)
    windows = windows_of_upper_layers(hf, shaped.num_layers)
    return replace(shaped, windows=windows, qkv_bias=True, o_bias=False)
