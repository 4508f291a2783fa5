"""Gemma 3, text: five layers with a window, then one without, each kind with its own rope.

A layer has two norms more than Llama's: what attention and the MLP give is normed before it is
added. Norms multiply by 1 + weight, embeddings by the square root of their width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.hf_config import HfConfig
from engine.models.config import ModelConfig, WeightNames
from engine.models.families.layer_windows import FULL, SLIDING, layer_kinds
from engine.models.families.llama_shaped import activation, heads, llama_shaped
from engine.models.rope import RopeConfig, rope_of

_DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_NAMES = WeightNames(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
_ELSEWHERE = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
"""Settings of Gemma 2 or of embedding models, which share the config class."""


def read(hf: HfConfig) -> ModelConfig:
    hf = hf.over(_DEFAULTS)
    for key in _ELSEWHERE:
        if hf.raw(key):
            hf.wrong(key, "is not supported for Gemma 3")
    rope_of_kind = _ropes(hf)
    shaped = llama_shaped(hf, rope_of_kind[FULL])
    pattern = hf.size("sliding_window_pattern", 6)
    kinds = layer_kinds(
        hf, [SLIDING if (i + 1) % pattern else FULL for i in range(shaped.num_layers)]
    )
    window = hf.size("sliding_window")
    return replace(
        shaped,
        windows=tuple(window if kind == SLIDING else None for kind in kinds),
        ropes=tuple(rope_of_kind[kind] for kind in kinds),
        activation=activation(hf, "hidden_activation"),
        attention_scale=hf.positive("query_pre_attn_scalar") ** -0.5,
        embedding_scale=shaped.hidden_size**0.5,
        norm_offset=1.0,
        qk_norm=True,
        names=_NAMES,
    )


def _ropes(hf: HfConfig) -> dict[str, RopeConfig]:
    """Read `rope_parameters`, an object for each kind of layer. Published files have a base for
    each kind instead, and a `rope_scaling` for the layers without a window."""
    by_kind, scaling = hf.section("rope_parameters"), hf.section("rope_scaling")
    if set(hf.raw("rope_parameters") or ()) - {SLIDING, FULL}:
        hf.wrong("rope_parameters", f"only {SLIDING} and {FULL} are expected")
    if by_kind and scaling:
        hf.wrong("rope_scaling", "rope_parameters is there too; leave one of them out")
    *_, head_dim = heads(hf)
    return {
        SLIDING: rope_of(by_kind.section(SLIDING), hf, "rope_local_base_freq", head_dim),
        FULL: rope_of(scaling or by_kind.section(FULL), hf, "rope_theta", head_dim),
    }
