"""What a greedy request must say: what transformers says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import transformers

from engine.request import SampledToken
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


def ids_of(tokens: Sequence[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]
