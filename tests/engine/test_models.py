"""What a config.json says of a model: rope in both forms, windows as layer groups, experts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from engine.errors import UnsupportedModelError
from engine.models.config import ModelConfig
from engine.models.families.table import model_config
from engine.models.rope import inverse_frequencies

BASE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


def read(architecture: str, **settings: Any) -> ModelConfig:
    return model_config({**BASE, "architectures": [f"{architecture}ForCausalLM"], **settings})


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("default", {}),
        ("linear", {"factor": 3.0}),
        ("llama3", LLAMA3),
        ("yarn", YARN),
        ("yarn", YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False}),
        ("yarn", YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}),
        ("yarn", YARN | {"attention_factor": 1.25}),
    ],
)
def test_rope_is_that_of_transformers_in_both_forms(kind: str, settings: dict[str, Any]) -> None:
    new = read("Llama", rope_parameters={"rope_type": kind, "rope_theta": 5e5, **settings})
    old = read("Llama", rope_theta=5e5, rope_scaling={"rope_type": kind, **settings})
    older = read("Llama", rope_theta=5e5, rope_scaling={"type": kind, **settings})
    assert new.ropes == old.ropes == older.ropes
    reference = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            **BASE, rope_parameters={"rope_type": kind, "rope_theta": 5e5, **settings}
        )
    )
    rope = new.ropes[0]
    torch.testing.assert_close(inverse_frequencies(rope), reference.inv_freq, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(reference.attention_scaling)


def test_head_dim_and_kv_heads_are_derived_where_they_are_not_given() -> None:
    llama = read("Llama")
    assert (llama.head_dim, llama.num_kv_heads) == (16, 4)
    assert read("Llama", head_dim=40).head_dim == 40
    assert read("Qwen3", num_key_value_heads=2).head_dim == 128


def test_each_run_of_layers_with_one_window_is_a_layer_group() -> None:
    qwen = read("Qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=4)
    groups = qwen.kv_layout(16, "bfloat16").groups
    assert [(g.first_layer, g.num_layers, g.window) for g in groups] == [(0, 4, None), (4, 2, 9)]
    kinds = ["sliding_attention", "full_attention", "full_attention"] * 2
    settings = {"use_sliding_window": True, "sliding_window": 9, "num_key_value_heads": 4}
    mixed = read("Qwen3", layer_types=kinds, **settings)
    groups = mixed.kv_layout(16, "bfloat16").groups
    assert [(g.first_layer, g.num_layers, g.window) for g in groups] == [
        (0, 1, 9),
        (1, 2, None),
        (3, 1, 9),
        (4, 2, None),
    ]


@pytest.mark.parametrize(
    ("architecture", "settings", "window"),
    [
        ("Mistral", {"sliding_window": 12, "num_key_value_heads": 2}, 12),
        ("Mistral", {"sliding_window": None, "num_key_value_heads": 2}, None),
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 12}, None),
        ("Llama", {"sliding_window": 12}, None),
    ],
)
def test_windows_hold_only_where_the_family_has_them(
    architecture: str, settings: dict[str, Any], window: int | None
) -> None:
    assert set(read(architecture, **settings).windows) == {window}


def test_qwen3_moe_says_which_layers_are_sparse() -> None:
    settings = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    config = read("Qwen3Moe", decoder_sparse_step=2, mlp_only_layers=[3], **settings)
    assert config.moe is not None
    assert config.moe.layers == (1, 5)
    assert not config.moe.normalise


def test_yarn_reaches_as_far_as_it_stretches_the_positions_of_the_config() -> None:
    published = {"max_position_embeddings": 40960, "rope_parameters": None, "rope_theta": 1e6}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read("Llama", **published, rope_scaling=scaling).longest_context == 131072
    assert read("Llama", **published).longest_context == 40960
    extended = {**published, "max_position_embeddings": 131072}
    assert read("Llama", **extended, rope_scaling=scaling).longest_context == 131072
    linear = {**scaling, "rope_type": "linear"}
    assert read("Llama", **published, rope_scaling=linear).longest_context == 40960


GEMMA = {
    "head_dim": 16,
    "rope_theta": 1e6,
    "rope_local_base_freq": 5e3,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "num_key_value_heads": 2,
    "sliding_window": 9,
    "sliding_window_pattern": 3,
}


def test_gemma_3_reads_alike_as_published_and_as_transformers_writes_it() -> None:
    published = {**BASE, **GEMMA, "architectures": ["Gemma3ForCausalLM"]}
    written = transformers.Gemma3TextConfig(**published).to_json_string(use_diff=False)
    config = model_config(published)
    assert config == model_config(json.loads(written))
    assert config.windows == (9, 9, None) * 2
    assert [(rope.theta, rope.factor) for rope in config.ropes] == [
        (5e3, 1),
        (5e3, 1),
        (1e6, 8),
    ] * 2


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "relu"}, "hidden_activation: 'relu'"),
        ({"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}}, "only sliding_attention"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "leave one of them out"),
    ],
)
def test_what_gemma_3_has_not_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read("Gemma3", **{**GEMMA, **settings})
