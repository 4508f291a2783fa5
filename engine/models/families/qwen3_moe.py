"""Qwen3-MoE: Qwen3 with experts in some layers."""

from __future__ import annotations

from dataclasses import replace

from engine.hf_config import HfConfig
from engine.models.config import ModelConfig, MoeConfig
from engine.models.families.layer_windows import optional_window
from engine.models.families.llama_shaped import llama_shaped

_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 4}


def read(hf: HfConfig) -> ModelConfig:
    hf = hf.over(_DEFAULTS)
    shaped = llama_shaped(hf)
    windows = optional_window(hf, shaped.num_layers)
    return replace(shaped, windows=windows, qk_norm=True, moe=_moe(hf, shaped.num_layers))


def _moe(hf: HfConfig, num_layers: int) -> MoeConfig | None:
    num_experts = hf.count("num_experts", hf.count("num_local_experts", 128))
    if num_experts == 0:
        return None
    step = hf.size("decoder_sparse_step", 1)
    dense = set(hf.list_of("mlp_only_layers", int) or ())
    sparse = (i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    return MoeConfig(
        layers=tuple(sparse),
        num_experts=num_experts,
        num_experts_per_token=hf.size("num_experts_per_tok", 8, most=num_experts),
        intermediate_size=hf.size("moe_intermediate_size", 768),
        normalise=hf.flag("norm_topk_prob", False),
        block_name="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
    )
