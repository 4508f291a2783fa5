"""Sampling: the right distribution, the same token alone and in a batch, clear refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from engine.api import Masks
from engine.errors import InvalidRequestError
from engine.request import SamplingParams
from engine.sampling.noise import gumbel_noise, noise_of_tokens, row_keys
from engine.schedule.admission import check_sampling
from tests.engine.sampling import EOS, GREEDY, frequencies, ids, keys_of, random_logits, sample


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


@given(
    output=st.lists(st.integers(0, 9), max_size=6),
    biases=st.dictionaries(st.integers(0, 9), st.floats(-100, 100, width=32)),
    allowed=st.frozensets(st.integers(0, 9)),
    bad_words=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), max_size=6),
)
@settings(max_examples=150, deadline=None)
def test_biases_allowed_tokens_and_bad_words_agree_with_a_naive_reference(
    output: list[int],
    biases: dict[int, float],
    allowed: frozenset[int],
    bad_words: list[tuple[int, ...]],
) -> None:
    params = SamplingParams(
        temperature=0.0,
        presence_penalty=1.5,
        logit_bias=tuple(biases.items()),
        allowed_tokens=sum(1 << t for t in allowed).to_bytes(2, "little") if allowed else b"",
        bad_words=tuple(bad_words),
        logprobs=0,
    )
    row = random_logits(1, 10, seed=len(output))[0]
    said = "".join(map(str, output))
    ends = {w[-1] for w in bad_words if said.endswith("".join(map(str, w[:-1])))}
    left = (allowed or set(range(10))) - ends or allowed or set(range(10))  # never none
    scores = {t: row[t].item() + biases.get(t, 0.0) - 1.5 * (t in output) for t in left}
    crowd = sample(row.expand(3, -1), [GREEDY, params, GREEDY], [([1], []), ([1], output)] * 2)
    assert scores[crowd[1].token_id] == pytest.approx(max(scores.values()), abs=1e-4)
    assert crowd[0].token_id == crowd[2].token_id == row.argmax()
    (drawn,) = sample(row[None], [replace(params, temperature=2.0, top_k=5)], [([1], output)])
    assert drawn.token_id in left
    known = crowd[1].logprobs  # of the model, before all of this
    assert known is not None
    assert known.logprob == pytest.approx(row.log_softmax(-1)[crowd[1].token_id].item(), abs=1e-5)


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
        ("prompt_logprobs", 101),
        ("seed", -1),
        ("seed", 2**64),
        ("stop_token_ids", frozenset({100})),
        ("logit_bias", ((100, 1.0),)),
        ("logit_bias", ((1, math.nan),)),
        ("bad_words", ((1, 100),)),
        ("bad_words", ((),)),
        ("allowed_tokens", bytes(9)),
        ("allowed_tokens", bytes(12) + b"\x10"),
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
        SamplingParams(seed=7, logit_bias=((5, 2.0),), bad_words=((4, 5, 9),)),
        SamplingParams(seed=8, allowed_tokens=b"\xff", top_k=3),
    ]
    logits, histories = random_logits(len(params), 5000), [([1, 2, 3], [4, 4, 5])] * len(params)
    with Copies() as copies:
        sample(logits, params, histories)
    assert (copies.to_device, copies.to_host) == (["to"], ["tolist"])
    with Copies() as copies:
        sample(logits, [GREEDY] * len(params), histories)
    assert (copies.to_device, copies.to_host) == ([], ["tolist"])
    masks = Masks((0, 3), np.full((2, 625), 0x11, np.uint8), {})
    with Copies() as copies:
        masked = sample(logits, params, histories, masks)
    assert (copies.to_device, copies.to_host) == (["to"], ["tolist"])
    assert [token % 4 == 0 for token in ids(masked)[:4:3]] == [True, True]
    with Copies() as copies:  # log-probabilities come with the tokens
        sample(logits, [replace(GREEDY, logprobs=n) for n in range(len(params))], histories)
    assert (copies.to_device, copies.to_host) == (["to"], ["tolist"])


# --- top-k, top-p and min-p, against a naive reference -------------------------------------------


def naive_kept(logits: list[float], params: SamplingParams) -> set[int]:
    """Straight from the definitions; logits all different."""
    order = sorted(range(len(logits)), key=lambda t: -logits[t])
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp(logits[t] / params.temperature) for t in order]
    total, seen, kept = sum(weights), 0.0, []
    for token, weight in zip(order, weights):
        if params.top_p < 1 and seen >= params.top_p:
            break
        kept.append(token)
        seen += weight / total
    return {t for t, w in zip(kept, weights) if w >= params.min_p * weights[0]}


def naive_draws(logits: list[float], params: SamplingParams) -> set[int]:
    """What noise makes the largest of those kept; a boundary may fall either way by one token
    where rounding decides, and then there is more than one right answer."""
    kept = naive_kept(logits, params)
    order = sorted(range(len(logits)), key=lambda t: -logits[t])
    sizes = {len(kept)}
    if params.top_p < 1 or params.min_p:
        sizes |= {max(1, len(kept) - 1), min(len(kept) + 1, len(logits))}
    noise = gumbel_noise(keys_of([(params.seed, 0)]), len(logits))[0].tolist()
    scaled = (torch.tensor(logits) / params.temperature).tolist()
    return {max(order[:size], key=lambda t: scaled[t] + noise[t]) for size in sizes}


@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.3, 1.0, 2.0]),
    vocab_size=st.sampled_from([2, 40, 1500]),
    top_k=st.sampled_from([0, 1, 2, 30, 256, 1200, 4000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
)
@settings(max_examples=200, deadline=None)
def test_the_token_is_the_best_of_those_that_the_filters_definitions_keep(
    seed: int, scale: float, vocab_size: int, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    logits = random_logits(3, vocab_size, seed) * scale
    crowd = [SamplingParams(top_p=0.2), params, SamplingParams(min_p=0.3, seed=1)]
    drawn = ids(sample(logits, crowd))[1]
    assert drawn in naive_draws(logits[1].tolist(), params)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_equally_likely_tokens_stay_or_go_together(top_p: float) -> None:
    logits = torch.zeros(1, 400)
    logits[0, 100:110] = 3.0  # the k-th is one of ten alike
    logits[0, 7] = 4.0
    params = SamplingParams(top_k=5, top_p=top_p)
    drawn = torch.nonzero(frequencies(logits, params, 2000))[:, 0].tolist()
    assert drawn == [7, *range(100, 110)]


def test_tokens_outside_the_filters_are_never_drawn() -> None:
    logits = random_logits(1, 50, seed=2) / 3
    for params in (
        SamplingParams(temperature=5.0, top_k=4),
        SamplingParams(temperature=2.0, top_p=0.4),
        SamplingParams(temperature=2.0, min_p=0.3),
        SamplingParams(temperature=2.0, top_k=20, top_p=0.6, min_p=0.05),
    ):
        scaled = (logits[0] / params.temperature).tolist()
        kept = naive_kept(scaled, replace(params, temperature=1.0))
        found = frequencies(logits, params, 3000)
        drawn = set(torch.nonzero(found)[:, 0].tolist())
        assert drawn == kept
        assert 1 < len(kept) < 50


# --- noise: a function of seed, output index and token, of the right distribution ----------------


def test_noise_does_not_repeat_over_positions_seeds_or_tokens() -> None:
    positions = [(seed, index) for seed in (0, 1, 2**63, 2**64 - 1) for index in range(40)]
    noise = gumbel_noise(keys_of(positions), 500).double()
    # In float32 about one of 700 of so many values equals another by chance.
    assert len(torch.unique(noise)) > 0.997 * noise.numel()
    # Standard Gumbel: mean 0.5772, variance pi^2 / 6.
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.04)
    rows = torch.corrcoef(noise) - torch.eye(len(positions))
    assert rows.abs().max() < 0.25
    assert rows.abs().mean() < 0.05


def test_noise_is_that_of_plain_integer_arithmetic() -> None:
    """A twin in Python integers: what any other implementation has to give."""

    def twin(seed: int, index: int, token: int) -> float:
        mask = (1 << 32) - 1
        key1, key2 = (key & mask for key in row_keys(seed, index))
        h = (token * (-1640531527 & mask)) & mask ^ key1
        h = h * (-862048943 & mask) & mask
        h ^= h >> 16
        h = (h * (-2048144789 & mask) + key2) & mask
        h ^= h >> 13
        h = h * (-1028477387 & mask) & mask
        h ^= h >> 16
        uniform = min(((h & 0x7FFFFFFF) + 0.5) * 2.0**-31, 1 - 2.0**-24)
        return -math.log(-math.log1p(-uniform))

    noise = gumbel_noise(keys_of([(7, 0), (2**64 - 1, 5)]), 300)
    for row, (seed, index) in enumerate([(7, 0), (2**64 - 1, 5)]):
        expected = [twin(seed, index, token) for token in range(300)]
        assert noise[row].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_noise_depends_on_the_output_index_and_not_on_the_prompt() -> None:
    logits = torch.zeros(1, 1000)
    params = SamplingParams(seed=5)
    tokens = [ids(sample(logits, [params], [([1] * n, [2] * 3)]))[0] for n in (1, 9, 30)]
    assert len(set(tokens)) == 1
    by_index = [ids(sample(logits, [params], [([1], [2] * n)]))[0] for n in range(8)]
    assert len(set(by_index)) == 8


@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 5000), count=st.integers(1, 70))
@settings(max_examples=40, deadline=None)
def test_noise_of_some_tokens_is_bit_for_bit_that_of_all(seed: int, index: int, count: int) -> None:
    positions = [(seed, index), (1, 2)]
    generator = torch.Generator().manual_seed(count)
    token_ids = torch.randint(0, 30_000, (2, count), generator=generator)
    every = gumbel_noise(keys_of(positions), 30_000)
    assert torch.equal(noise_of_tokens(keys_of(positions), token_ids), every.gather(1, token_ids))
