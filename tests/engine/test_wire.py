"""Requests read from the wire."""

from __future__ import annotations

import pytest

from baton.errors import InvalidRequestError
from baton.v1 import common_pb2, worker_pb2
from engine.request import SamplingParams
from engine.wire import read_spec


def message(**changes: object) -> worker_pb2.RequestSpec:
    fields = {
        "request_id": "r",
        "attempt": 3,
        "token_ids": b"\x01\x00\x00\x00\x02\x01\x00\x00",
        "num_prompt_tokens": 1,
        "seed": 9,
        "stop_token_ids": [4, 5],
    }
    return worker_pb2.RequestSpec(**(fields | changes))  # type: ignore[arg-type]


def test_tokens_prompt_and_attempt_are_read() -> None:
    spec = read_spec(message())
    assert spec.request_id == "r#3"
    assert spec.token_ids.tolist() == [1, 258]
    assert spec.num_emitted_tokens == 1


def test_unset_sampling_fields_take_the_engines_defaults_and_zeros_are_kept() -> None:
    defaults = SamplingParams(seed=9, stop_token_ids=frozenset({4, 5}))
    assert read_spec(message()).sampling == defaults
    sent = common_pb2.SamplingParams(temperature=0.0, logprobs=0, ignore_eos=False, max_tokens=3)
    read = read_spec(message(sampling=sent)).sampling
    assert (read.temperature, read.logprobs, read.ignore_eos, read.max_tokens) == (0.0, 0, False, 3)
    assert read.top_p == defaults.top_p


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"request_id": ""}, "request_id"),
        ({"token_ids": b"abc"}, "token_ids"),
        ({"num_prompt_tokens": 3}, "num_prompt_tokens"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens"),
        ({"token_ids": b""}, "num_prompt_tokens"),
        ({"num_public_tokens": 2}, "num_public_tokens"),
        ({"bad_words": [b"abc"]}, "bad_words"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_spec(message(**changes))
    assert caught.value.field == named
