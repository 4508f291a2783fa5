"""Models with 8-bit weights say what transformers says with the numbers that these mean."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers

from baton.config.engine import EngineConfig
from engine.errors import ModelError, ShardingError
from engine.models.checkpoint.folder import read_config
from engine.models.roofline import RankCost
from engine.models.sharding import shard_of
from engine.run.build import load_model_spec
from engine.run.torch_runner import load_torch_decoder
from tests.engine import checkpoints, families
from tests.engine.driving import Driver, generate, random_prompt, set_up
from tests.engine.linear import quantised
from tests.engine.tp_rank import CONFIG, replica

NUM_TOKENS = 10
AT_LOAD = dataclasses.replace(CONFIG, quantization="int8")


def check(folder: Path, config: EngineConfig, oracle: transformers.PreTrainedModel) -> None:
    torch.set_num_threads(1)
    prompts = [random_prompt(n, families.VOCAB, n) for n in (1, 40, 131)]
    found = generate(Driver(set_up(folder, config)), prompts, NUM_TOKENS, chunk=64)
    assert found == [checkpoints.greedy_answer(oracle, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(
    ("family", "layout", "group", "ignore"),
    [
        ("llama", "pack-quantized", None, ()),
        ("qwen3", "pack-quantized", 32, ("lm_head",)),
        ("llama-tied-linear", "int-quantized", 16, ("lm_head", "down_proj")),
        ("mixtral", "int-quantized", 32, ("lm_head", "gate")),
    ],
)
def test_tokens_are_those_of_the_dequantised_checkpoint(
    tmp_path: Path, family: str, layout: str, group: int | None, ignore: tuple[str, ...]
) -> None:
    check(tmp_path / "m", CONFIG, quantised.save(family, tmp_path / "m", layout, group, ignore))


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3"])
def test_tokens_of_weights_quantised_at_load_are_those_of_what_they_mean(
    tmp_path: Path, family: str
) -> None:
    check(tmp_path / "m", AT_LOAD, quantised.at_load(family, tmp_path / "m"))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torchs_product_serves(tmp_path: Path) -> None:
    check(tmp_path / "m", AT_LOAD, quantised.at_load("qwen2", tmp_path / "m"))


@pytest.mark.parametrize(
    ("family", "layout", "config"),
    [
        ("qwen2", "pack-quantized", CONFIG),
        ("qwen3-moe", "int-quantized", CONFIG),
        ("llama", None, AT_LOAD),
    ],
)
def test_two_ranks_give_the_oracles_tokens(
    tmp_path: Path, family: str, layout: str | None, config: EngineConfig
) -> None:
    folder = tmp_path / "m"
    oracle = (
        quantised.at_load(family, folder)
        if layout is None
        else quantised.save(family, folder, layout, None, ("lm_head", "gate"))
    )
    prompts = [random_prompt(n, families.VOCAB, n) for n in (1, 40, 131)]
    with replica(folder, 2, config) as (setup, others):
        found = generate(Driver(setup), prompts, 8, chunk=64)
        assert found == [checkpoints.greedy_answer(oracle, prompt, 8) for prompt in prompts]
    assert [other.exitcode for other in others] == [0]


def test_ranks_that_would_split_a_group_are_refused(tmp_path: Path) -> None:
    quantised.save("llama", tmp_path / "m", "pack-quantized", 32, ())
    spec = load_model_spec(str(tmp_path / "m"), CONFIG)  # its MLP is 96 wide: 48 for each rank

    class SecondOfTwo:
        rank, size = 1, 2

    with pytest.raises(ShardingError, match=r"down_proj: ranks would split groups of 32 inputs"):
        load_torch_decoder(str(tmp_path / "m"), CONFIG, spec, SecondOfTwo())  # type: ignore[arg-type]


def test_quantised_weights_are_another_model(tmp_path: Path) -> None:
    checkpoints.save("llama", tmp_path)
    plain, int8 = (load_model_spec(str(tmp_path), config) for config in (CONFIG, AT_LOAD))
    assert plain.model_fingerprint != int8.model_fingerprint
    assert plain.kv_fingerprint != int8.kv_fingerprint


def test_a_quantised_checkpoint_stays_as_it_is(tmp_path: Path) -> None:
    quantised.save("llama", tmp_path / "m", "int-quantized", None, ("lm_head",))
    once, twice = (load_model_spec(str(tmp_path / "m"), config) for config in (CONFIG, AT_LOAD))
    assert once == twice


def test_sizes_count_what_the_format_keeps(tmp_path: Path) -> None:
    quantised.save("llama", tmp_path / "m", "pack-quantized", 32, ("lm_head",))
    config = read_config(tmp_path / "m")
    hidden, width, heads, kv = 128, 96, 4 * 32, 2 * 32
    numbers = 3 * hidden * (2 * heads + 2 * kv + 3 * width)  # of three layers
    vocabularies = 2 * families.VOCAB * hidden
    expected = numbers + 4 * numbers // 32 + 2 * vocabularies
    assert RankCost(config, "bfloat16").weight_bytes == expected
    assert shard_of(config, 0, 1).size == 1


WRONG: list[tuple[dict[str, object], str]] = [
    ({"config_groups.group_0.weights.num_bits": 4}, r"4 bits \(int\) are not supported"),
    ({"config_groups.group_0.weights.type": "float"}, r"8 bits \(float\) are not supported"),
    ({"config_groups.group_0.weights.symmetric": False}, "zero points"),
    ({"config_groups.group_0.weights.actorder": "group"}, "actorder: 'group'"),
    ({"config_groups.group_0.weights.strategy": "tensor"}, "strategy: 'tensor'"),
    ({"config_groups.group_0.weights.dynamic": True}, "dynamic"),
    ({"config_groups.group_0.input_activations": {"num_bits": 8}}, "activations"),
    ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ({"format": "float-quantized"}, "'float-quantized' is not supported; supported: pack-qu"),
    ({"ignore": ["re:("]}, "no pattern"),
    ({"quant_method": "gptq"}, r"\(gptq\) are not supported; supported: compressed-tensors"),
    (
        {
            "config_groups.group_0.weights.group_size": 7,
            "config_groups.group_0.weights.strategy": "group",
        },
        "128 inputs are no multiple of group_size 7",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    quantised.save("llama", tmp_path / "m", "pack-quantized", None, ())
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        *way, last = key.split(".")
        section = config["quantization_config"]
        for name in way:
            section = section[name]
        section[last] = value
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_torch_decoder(
            str(path.parent), CONFIG, load_model_spec(str(path.parent), CONFIG), None
        )
