"""What all families share: the shape of Llama's decoder and the keys that say its sizes.

A family's `read` starts from `llama_shaped` and replaces what differs.
"""

from __future__ import annotations

from typing import Any

from engine.hf_config import HfConfig
from engine.kernels.protocol import Activation
from engine.models.config import ModelConfig
from engine.models.rope import RopeConfig, rope_from_hf

_MOST_LAYERS = 10_000
# Of the published config classes, for keys that a config.json may leave out.
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


def llama_shaped(hf: HfConfig, rope: RopeConfig | None = None) -> ModelConfig:
    """Read a dense decoder whose layers are alike and see all tokens.

    `rope`: None reads the file's only one. Raises UnsupportedModelError.
    """
    hf = hf.over(_DEFAULTS)
    num_layers = hf.size("num_hidden_layers", most=_MOST_LAYERS)
    num_heads, num_kv_heads, head_dim = heads(hf)
    attention_bias = hf.flag("attention_bias", False)
    return ModelConfig(
        vocab_size=hf.size("vocab_size"),
        hidden_size=hf.size("hidden_size"),
        intermediate_size=hf.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=hf.positive("rms_norm_eps"),
        max_position_embeddings=hf.size("max_position_embeddings"),
        ropes=(rope or rope_from_hf(hf, head_dim),) * num_layers,
        windows=(None,) * num_layers,
        attention_scale=head_dim**-0.5,
        activation=activation(hf, "hidden_act"),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=hf.flag("mlp_bias", False),
    )


def heads(hf: HfConfig) -> tuple[int, int, int]:
    """Attention heads, key-value heads, and the width of each."""
    num_heads = hf.size("num_attention_heads")
    num_kv_heads = hf.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        hf.wrong(
            "num_key_value_heads",
            f"{num_heads} attention heads are no multiple of {num_kv_heads} key-value heads",
        )
    head_dim = hf.size_or_none("head_dim") or hf.size("hidden_size") // num_heads
    if head_dim < 1 or head_dim % 2:  # rotary embeddings turn pairs
        hf.wrong("head_dim", f"an even number of dimensions is expected, not {head_dim}")
    return num_heads, num_kv_heads, head_dim


def activation(hf: HfConfig, key: str) -> Activation:
    """The function of the MLP's gate that `key` names; null is silu."""
    name = hf.raw(key) or "silu"
    found = _ACTIVATIONS.get(name) if isinstance(name, str) else None
    if found is None:
        hf.wrong(key, f"{name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return found
