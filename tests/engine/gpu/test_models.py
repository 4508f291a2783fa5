"""Every family gives the same tokens on a device as in float32 on the CPU, and as transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.run.build import load_lone_engine
from tests.engine.families import FAMILIES
from tests.engine.gpu.models import (
    GREEDY,
    answers,
    config_on,
    engine_on,
    likeliest,
    prompts_of,
    reference_engine,
)

LENGTHS = (1, 16, 47, 129, 333)


@pytest.mark.gpu
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_and_their_likelihoods_are_those_of_the_cpu(
    family: str, device: torch.device
) -> None:
    config, prompts = config_on(device), prompts_of(LENGTHS)
    expected = answers(reference_engine(family, config), prompts)
    assert answers(engine_on(device, family, config), prompts) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3-windows", "qwen3-moe"])
def test_a_prompt_whose_kv_is_cached_gets_the_same_tokens(
    family: str, device: torch.device
) -> None:
    engine, prompts = engine_on(device, family, config_on(device)), prompts_of([200, 90])
    first = answers(engine, prompts)
    assert answers(engine, prompts) == first


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3-moe"])
def test_first_tokens_are_about_as_likely_in_a_narrow_dtype(
    family: str, dtype: str, device: torch.device
) -> None:
    """One token of each prompt, forced by nothing before it: rounding has not added up. Which one
    is drawn is chance where two are nearly as likely; how likely each is, is not."""
    prompts = prompts_of([5, 17, 64, 130])
    expected = likeliest(reference_engine(family, config_on(device)), prompts)
    found = likeliest(engine_on(device, family, config_on(device, dtype)), prompts)
    for here, reference in zip(found, expected):
        best = sorted(reference, key=lambda token: -reference[token])[:3]
        assert {token: here[token] for token in best} == {
            token: pytest.approx(reference[token], abs=0.5) for token in best
        }


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe", "gemma3"]
)
def test_greedy_tokens_are_those_of_transformers(
    family: str, device: torch.device, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from tests.engine import checkpoints

    oracle = checkpoints.save(family, tmp_path)
    prompts = prompts_of([1, 47, 200])
    expected = [
        checkpoints.greedy_answer(oracle, prompt.tolist(), GREEDY.max_tokens) for prompt in prompts
    ]
    assert answers(load_lone_engine(str(tmp_path), config_on(device)), prompts) == expected
