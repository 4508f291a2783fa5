"""What a request must say: transformers for greedy tokens, one engine alone for sampled ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from baton.config.engine import EngineConfig
from engine.build import load_lone_engine
from engine.request import RequestId, RequestSpec, SampledToken, SamplingParams, TokenEvent
from tests.engine import checkpoints
from tests.engine.greedy import Greedy

Overrides = tuple[tuple[str, Any], ...]


@lru_cache
def oracle_model(family: str, overrides: Overrides = ()) -> transformers.PreTrainedModel:
    """The model in memory; it knows no end of sequence."""
    return checkpoints.oracle_model(family, **dict(overrides))


def greedy_tokens(
    family: str, overrides: Overrides, prompt: Sequence[int], num_tokens: int
) -> list[int]:
    """What transformers says. It knows no chunks, blocks or widths: it is asked once."""
    return list(greedy_answer(family, overrides, tuple(prompt), num_tokens).ids)


@cache
def greedy_answer(
    family: str, overrides: Overrides, prompt: tuple[int, ...], num_tokens: int
) -> Greedy:
    """The same, with how likely transformers holds each token."""
    return checkpoints.greedy_answer(oracle_model(family, overrides), list(prompt), num_tokens)


def engine_alone(
    folder: Path,
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
) -> list[list[SampledToken]]:
    """What one engine in this process, with fresh memory, says to all prompts in one batch."""
    if isinstance(sampling, SamplingParams):
        sampling = [sampling] * len(prompts)
    engine = load_lone_engine(str(folder), replace(config, device="cpu"))
    found: list[list[SampledToken]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        name, token_ids = RequestId(str(number)), np.array(prompt, np.uint32)
        engine.add(RequestSpec(name, token_ids, len(prompt), sampling[number]))
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, TokenEvent):
                found[int(event.request_id)].append(event.token)
    engine.check_integrity()
    return found


def answer_of(tokens: Sequence[SampledToken]) -> Greedy:
    """Of greedy tokens that were asked for with their log-probabilities."""
    logprobs = [token.logprobs.logprob for token in tokens if token.logprobs is not None]
    return Greedy(ids_of(tokens), logprobs)


def ids_of(tokens: Sequence[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]
