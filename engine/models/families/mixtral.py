"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from engine.hf_config import HfConfig
from engine.models.config import ModelConfig, MoeConfig
from engine.models.families.layer_windows import one_window
from engine.models.families.llama_shaped import llama_shaped

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}


def read(hf: HfConfig) -> ModelConfig:
    hf = hf.over(_DEFAULTS)
    shaped = llama_shaped(hf)
    num_experts = hf.size("num_local_experts", 8)
    moe = MoeConfig(
        layers=tuple(range(shaped.num_layers)),
        num_experts=num_experts,
        num_experts_per_token=hf.size("num_experts_per_tok", 2, most=num_experts),
        intermediate_size=shaped.intermediate_size,
        normalise=True,
        block_name="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    return replace(shaped, windows=one_window(hf, shaped.num_layers), moe=moe)
