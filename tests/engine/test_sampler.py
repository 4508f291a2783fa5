"""Sampling: the right distribution, the same token alone and in a batch, clear refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from engine.admission import check_sampling
from engine.errors import InvalidRequestError
from engine.request import SamplingParams
from tests.engine.sampling import EOS, GREEDY, frequencies, ids, random_logits, sample


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_greedy_takes_the_likeliest_and_leaves_the_logits_alone() -> None:
    logits = random_logits(5, 100)
    before = logits.clone()
    crowd = [GREEDY, SamplingParams(top_k=1), replace(GREEDY, min_tokens=4), SamplingParams()]
    sampled = ids(sample(logits, [*crowd, replace(GREEDY, presence_penalty=1.0)]))
    assert sampled[:2] == logits.argmax(-1).tolist()[:2]
    assert torch.equal(logits, before)


@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 5000]),
    top_p=st.sampled_from([1.0, 0.9, 0.1]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    num_output=st.integers(0, 6),
)
@settings(max_examples=60, deadline=None)
def test_a_row_gets_the_same_token_alone_and_in_any_batch(
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    num_output: int,
) -> None:
    mine = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        logprobs=2,
    )
    history = ([5, 6, 7], [8, 9, 8, 9, 8, 9][:num_output])
    logits = random_logits(4, 3000, seed % 1000)
    (alone,) = sample(logits[2:3], [mine], [history])
    others = [SamplingParams(seed=1), GREEDY, mine, SamplingParams(top_p=0.99, seed=seed)]
    histories = [([1], []), ([2, 2], [2]), history, ([3], [4])]
    together = sample(logits, others, histories)[2]
    assert together.token_id == alone.token_id
    assert alone.logprobs is not None
    assert together.logprobs is not None
    assert together.logprobs.rank == alone.logprobs.rank
    assert together.logprobs.logprob == pytest.approx(alone.logprobs.logprob, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_tokens_are_drawn_with_the_probabilities_of_the_softmax(temperature: float) -> None:
    logits = random_logits(1, 24, seed=4)
    expected = (logits[0] / temperature).softmax(-1)
    count = 20_000
    found = frequencies(logits, SamplingParams(temperature=temperature), count)
    deviations = (found - expected).abs() / (expected * (1 - expected) / count).sqrt()
    assert deviations[expected * count > 5].max() < 4.5


@given(
    given_ids=st.lists(st.integers(0, 19), min_size=1, max_size=12),
    output=st.lists(st.integers(0, 19), max_size=12),
    repetition=st.sampled_from([0.5, 1.0, 1.3, 2.0]),
    presence=st.sampled_from([-2.0, 0.0, 0.7]),
    frequency=st.sampled_from([-0.5, 0.0, 0.9]),
)
@settings(max_examples=80, deadline=None)
def test_penalties_agree_with_a_naive_reference(
    given_ids: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    logits = random_logits(1, 20, seed=len(output))
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    scores = logits[0].tolist()
    for token in set(given_ids) | set(output):
        scores[token] *= 1 / repetition if scores[token] > 0 else repetition
    for token in set(output):
        scores[token] -= presence + frequency * output.count(token)
    crowd = sample(
        logits.expand(3, -1), [GREEDY, params, params], [([1], []), (given_ids, output), ([0], [0])]
    )
    assert scores[crowd[1].token_id] == pytest.approx(max(scores), abs=1e-5)


# --- minimum length, log-probabilities ----------------------------------------------------------


def test_stop_and_eos_ids_are_not_drawn_before_min_tokens() -> None:
    logits = torch.zeros(1, 8)
    logits[0, EOS] = 30.0
    logits[0, 5] = 20.0
    params = replace(GREEDY, min_tokens=2, stop_token_ids=frozenset({5}))
    early, late = ([1], [2]), ([1], [2, 2])
    assert ids(sample(logits, [params], [early]))[0] not in (EOS, 5)
    assert ids(sample(logits, [params], [late])) == [EOS]
    assert ids(sample(logits, [replace(params, ignore_eos=True)], [early])) == [EOS]


def test_logprobs_are_those_of_the_model_before_temperature_and_penalties() -> None:
    logits = random_logits(2, 60)
    expected = logits.log_softmax(-1)
    params = SamplingParams(temperature=3.0, repetition_penalty=2.0, logprobs=4, seed=9)
    sampled = sample(logits, [params, GREEDY], [([1, 2], [3]), ([1], [])])
    found = sampled[0].logprobs
    assert found is not None
    row = expected[0]
    assert found.logprob == pytest.approx(row[sampled[0].token_id].item(), abs=1e-5)
    assert found.rank == 1 + int((row > row[sampled[0].token_id]).sum())
    assert [t for t, _ in found.top] == row.topk(4).indices.tolist()
    assert [p for _, p in found.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-5)
    assert sampled[1].logprobs is None
    (bare,) = sample(logits[:1], [replace(params, logprobs=0)])
    assert bare.logprobs is not None
    assert bare.logprobs.top == ()


# --- checks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.5),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -1),
        ("logprobs", 101),
        ("seed", -1),
        ("seed", 2**64),
        ("stop_token_ids", frozenset({100})),
    ],
)
def test_an_impossible_value_is_refused_by_its_field(field: str, value: object) -> None:
    check_sampling(SamplingParams(), 100)
    with pytest.raises(InvalidRequestError) as caught:
        check_sampling(replace(SamplingParams(), **{field: value}), 100)  # type: ignore[arg-type]
    assert caught.value.field == field


class Copies(TorchFunctionMode):
    """Notes what would go between a GPU and its host, each time with the host waiting for it."""

    def __init__(self) -> None:
        self.to_device: list[str] = []
        self.to_host: list[str] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.__name__
        if name in ("tensor", "as_tensor") or (name == "to" and isinstance(args[1], torch.device)):
            self.to_device.append(name)
        if name in ("__getitem__", "__setitem__") and _has_list(args[1]):
            self.to_device.append(name)
        if name in ("tolist", "item", "nonzero", "__float__", "__int__", "__bool__", "bincount"):
            self.to_host.append(name)
        return func(*args, **(kwargs or {}))


def _has_list(index: object) -> bool:
    return isinstance(index, list) or (isinstance(index, tuple) and any(map(_has_list, index)))


def test_a_steps_rows_go_to_the_device_in_one_copy_and_come_back_in_one() -> None:
    params = [
        GREEDY,
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=40, temperature=0.7),
        SamplingParams(seed=3, top_k=9, top_p=0.9, min_p=0.01),
        SamplingParams(seed=4, min_p=0.05),
        SamplingParams(seed=5, repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(seed=6, min_tokens=9, stop_token_ids=frozenset({7, 8})),
    ]
    logits, histories = random_logits(len(params), 5000), [([1, 2, 3], [4, 4, 5])] * len(params)
    with Copies() as copies:
        sample(logits, params, histories)
    assert (copies.to_device, copies.to_host) == (["to"], ["tolist"])
    with Copies() as copies:
        sample(logits, [GREEDY] * len(params), histories)
    assert (copies.to_device, copies.to_host) == ([], ["tolist"])
    with Copies() as copies:  # log-probabilities follow on the tokens
        sample(logits, [replace(GREEDY, logprobs=n) for n in range(len(params))], histories)
    assert (copies.to_device, copies.to_host) == (["to"], ["tolist", "tolist"])
