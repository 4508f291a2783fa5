"""Tiny models of every family as Hugging Face configs, and weights scaled so that KV matters.

At the usual scale of random weights attention is almost uniform and the residual stream drowns what
it reads: a lost block would go unseen. Here queries and keys are large, so that attention is peaky,
and attention's outputs outweigh the embeddings. Even so a block of a long prompt may go without
changing a dozen tokens; it changes how likely they are, which is compared too.
"""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 384
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 128,  # heads of 32, the fewest numbers that the native kernels take
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.02,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
_MOE = {"num_experts_per_tok": 2, "head_dim": 32}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama-tied-linear": (
        "Llama",
        {
            "hidden_size": 64,  # heads of 16, which the native kernels leave to torch's
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 40, "head_dim": 32}),
    "qwen2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": _YARN}),
    "qwen3-windows": (
        "Qwen3",
        {
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            **_MOE,
            "num_experts": 8,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 48,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
            },
        },
    ),
}


def hf_config(family: str) -> dict[str, Any]:
    """The family's config.json."""
    name, settings = FAMILIES[family]
    return {"architectures": [f"{name}ForCausalLM"], **COMMON, **settings}


def random_weight(
    family: str, name: str, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """float32, of the tensor of this name."""
    noise = torch.randn(shape, generator=generator)
    gemma = family == "gemma3"  # its norms add 1 to their weights, its embeddings are scaled
    if "norm" in name:
        centre = 1.8 if "q_norm" in name or "k_norm" in name else 1.0
        return centre - gemma + 0.1 * noise
    if name.endswith("bias"):
        return 0.2 * noise
    if "embed" in name:
        return (0.3 / shape[-1] ** 0.5 if gemma else 0.3) * noise
    peaky = "q_proj" in name or "k_proj" in name
    scale = 1.8 if peaky else 1.2 if "o_proj" in name else 1.0
    return scale * noise * shape[-1] ** -0.5
