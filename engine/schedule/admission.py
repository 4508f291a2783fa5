"""Refuse at once what an engine could never run. The error names the field."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import InvalidRequestError
from engine.request import RequestSpec, SamplingParams

MAX_SEED = (1 << 64) - 1


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
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
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(params, field)
        if value is not None and not 0 <= value <= vocab_size:
            raise InvalidRequestError(field, f"{field} is {value}, not in [0, {vocab_size}]")
    _check_token_ids(params, vocab_size)


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    allowed = int.from_bytes(params.allowed_tokens, "little").bit_length()
    for field, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("bad_words", [token for word in params.bad_words for token in word or (-1,)]),
        ("allowed_tokens", [allowed - 1] if params.allowed_tokens else []),
    ):
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise InvalidRequestError(
                field, f"{field}: {outside[0]} is outside the vocabulary of {vocab_size}"
            )
    if not all(math.isfinite(bias) for _, bias in params.logit_bias):
        raise InvalidRequestError("logit_bias", "logit_bias: one is not finite")


@dataclass(frozen=True)
class Limits:
    """What bounds a step and a request."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_kv_tokens: int | None  # that all of KV memory holds; None: windows leave blocks as they go
    vocab_size: int
    eos_token_ids: frozenset[int]


def check_spec(spec: RequestSpec, limits: Limits, prefill_only: bool) -> int:
    """Return the request's greatest length, prompt and output. Raises InvalidRequestError.

    The output of a prefill-only request continues on another worker, up to that worker's context.
    Here only the prompt must fit.
    """
    num_tokens = len(spec.token_ids)
    if not 0 < spec.num_prompt_tokens <= num_tokens:
        raise InvalidRequestError("prompt", "the prompt is empty")
    if num_tokens >= limits.max_model_len:
        raise InvalidRequestError(
            "prompt", f"{num_tokens} tokens leave no room in a context of {limits.max_model_len}"
        )
    largest = int(spec.token_ids.max())
    if largest >= limits.vocab_size:
        raise InvalidRequestError(
            "token_ids", f"token id {largest} is outside the vocabulary of {limits.vocab_size}"
        )
    check_sampling(spec.sampling, limits.vocab_size)
    if spec.grammar is not None and (spec.sampling.ignore_eos or spec.sampling.min_tokens):
        raise InvalidRequestError("grammar", "ignore_eos and min_tokens exclude a grammar's end")
    max_tokens = spec.sampling.max_tokens
    if spec.num_emitted_tokens >= max_tokens:
        raise InvalidRequestError("max_tokens", f"all {max_tokens} tokens are emitted already")
    max_len = spec.num_prompt_tokens + max_tokens
    if not prefill_only:
        max_len = min(max_len, limits.max_model_len)
    # The last token's KV is never computed; a prefill-only request computes its prompt alone.
    most_tokens = num_tokens if prefill_only else max_len - 1
    if limits.max_kv_tokens is not None and most_tokens > limits.max_kv_tokens:
        field = "prompt" if num_tokens > limits.max_kv_tokens else "max_tokens"
        raise InvalidRequestError(
            field, f"{most_tokens} tokens can never fit into KV memory for {limits.max_kv_tokens}"
        )
    return max_len
