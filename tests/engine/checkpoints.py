"""Checkpoints of `tests.engine.families`, made with transformers, which is the oracle of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.engine.families import COMMON, FAMILIES, VOCAB, random_weight
from tests.engine.greedy import Greedy


def oracle_model(family: str, **overrides: Any) -> transformers.PreTrainedModel:
    """The family's model in fp32 with scaled random weights; the same in every process."""
    name, settings = FAMILIES[family]
    model_class = getattr(transformers, f"{name}ForCausalLM")
    config = model_class.config_class(**{**COMMON, **settings, **overrides})
    config._attn_implementation = "eager"
    torch.manual_seed(1234)
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            parameter.copy_(random_weight(family, parameter_name, shape, generator))
    return model


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
