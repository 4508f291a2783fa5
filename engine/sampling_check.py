"""Refuse sampling values that cannot be meant. Needs no torch: every engine checks with it."""

from __future__ import annotations

import math

from engine.errors import InvalidRequestError
from engine.request import SamplingParams

MAX_SEED = (1 << 64) - 1


def check(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequestError naming the first field whose value is impossible."""
    limits: tuple[tuple[str, float, float], ...] = (
        ("temperature", 0.0, 1e6),
        ("top_k", 0, math.inf),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.0, 1e6),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("max_tokens", 1, math.inf),
        ("min_tokens", 0, params.max_tokens),
        ("seed", 0, MAX_SEED),
    )
    for field, low, high in limits:
        value = getattr(params, field)
        if not low <= value <= high:  # false for nan too
            raise InvalidRequestError(field, f"{field} is {value}, not in [{low:g}, {high:g}]")
    for field in ("top_p", "repetition_penalty"):
        if getattr(params, field) == 0:
            raise InvalidRequestError(field, f"{field} must be greater than 0")
    if params.logprobs is not None and not 0 <= params.logprobs <= vocab_size:
        raise InvalidRequestError(
            "logprobs", f"logprobs is {params.logprobs}, not in [0, {vocab_size}]"
        )
    outside = [token for token in params.stop_token_ids if not 0 <= token < vocab_size]
    if outside:
        raise InvalidRequestError(
            "stop_token_ids",
            f"stop token id {min(outside)} is outside the vocabulary of {vocab_size}",
        )
