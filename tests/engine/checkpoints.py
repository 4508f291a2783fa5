"""Tiny random checkpoints of every family, made with transformers, scaled so that KV matters.

At the usual scale of random weights attention is almost uniform and the residual stream drowns what
it reads: a lost block would go unseen. Here queries and keys are large, so that attention is peaky,
and attention's outputs outweigh the embeddings. Even so a block of a long prompt may go without
changing a dozen tokens; it changes how likely they are, which is compared too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

VOCAB = 384
# Rounding moves a log-probability by less (qwen3 by up to 2e-4, the others 1e-5), any one harm to
# the KV of 1,500 tokens moves one of a dozen by more: every comparison shows the one, `test_oracle`
# the other.
LOGPROB_TOLERANCE = 1e-3
_COMMON = {
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
}


def oracle_model(family: str, **overrides: Any) -> transformers.PreTrainedModel:
    """The family's model in fp32 with scaled random weights; the same in every process."""
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **settings, **overrides})
    config._attn_implementation = "eager"
    torch.manual_seed(1234)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _fill(parameter_name, parameter, generator)
    return model


def _fill(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    noise = torch.randn(parameter.shape, generator=generator)
    if "norm" in name:
        centre = 1.8 if "q_norm" in name or "k_norm" in name else 1.0
        parameter.copy_(centre + 0.1 * noise)
    elif name.endswith("bias"):
        parameter.copy_(0.2 * noise)
    elif "embed" in name:
        parameter.copy_(0.3 * noise)
    else:
        peaky = "q_proj" in name or "k_proj" in name
        scale = 1.8 if peaky else 1.2 if "o_proj" in name else 1.0
        parameter.copy_(scale * noise * parameter.shape[-1] ** -0.5)


def save(family: str, folder: Path, **overrides: Any) -> transformers.PreTrainedModel:
    """Write the family's checkpoint as transformers does, and give the model back as oracle."""
    model = oracle_model(family, **overrides)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """One word per token id, so that a router can serve the checkpoint."""
    words = {f"w{token_id}": token_id for token_id in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def set_eos(folder: Path, token_id: int) -> None:
    """Let a saved checkpoint name its end-of-sequence token; the oracle goes on knowing none."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": token_id}))


@dataclass(frozen=True, eq=False)
class Greedy:
    """The likeliest tokens in a row, and the natural logarithms of how likely each was."""

    ids: list[int]
    logprobs: list[float]

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        """The same tokens, and as likely but for rounding. NaN is never equal."""
        return (
            isinstance(other, Greedy)
            and self.ids == other.ids
            and len(self.logprobs) == len(other.logprobs) == len(self.ids)
            and all(
                abs(one - its) <= LOGPROB_TOLERANCE
                for one, its in zip(self.logprobs, other.logprobs)
            )
        )


def greedy(model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The oracle: what transformers generates."""
    return greedy_answer(model, prompt, num_tokens).ids


def greedy_answer(
    model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int
) -> Greedy:
    """The oracle, with how likely it held each token."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logprobs = torch.cat(found.logits).float().log_softmax(-1)
    ids = found.sequences[0, len(prompt) :]
    return Greedy(ids.tolist(), logprobs.gather(-1, ids[:, None])[:, 0].tolist())
