"""Write the trained model as an ordinary Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from corpus import PAD_ID, SPECIAL_TOKENS
from llama import Llama, Shape
from safetensors.torch import save_file
from tokenizers import Tokenizer

BOS_ID, END_ID = SPECIAL_TOKENS.index("<|bos|>"), SPECIAL_TOKENS.index("<|end|>")
# Every message is <|role|>text<|end|>; the answer begins after <|assistant|>. Tools, calls and
# results are as Hermes has them. The model was trained on none: only a constraint makes it call.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|># Tools\\nTo call one, answer with <tool_call>\\n"
    '{"name": <name>, "arguments": <object>}\\n</tool_call>.\' }}'
    "{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>\\n' + message['content'] + '\\n</tool_response><|end|>' }}"
    "{% else %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\\n' if message['content'] or not loop.first else '' }}"
    "{{ '<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments}"
    " | tojson + '\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def model_config(shape: Shape) -> dict[str, object]:
    """What config.json says."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "bfloat16",
    }


def tokenizer_config(shape: Shape) -> dict[str, object]:
    """What tokenizer_config.json says."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"],
        "model_max_length": shape.max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def generation_config() -> dict[str, object]:
    """What generation_config.json says."""
    return {
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "do_sample": True,
        "temperature": 0.7,
    }


def write_checkpoint(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights in bf16 and all configuration into `folder`, which is made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", model_config(model.shape)),
        ("tokenizer_config.json", tokenizer_config(model.shape)),
        ("generation_config.json", generation_config()),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
