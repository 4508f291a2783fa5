"""Sampled tokens depend on the seed alone, log-probabilities on the model alone, and a request ends
where it should; whichever workers serve it, through whichever router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import numpy as np
import openai
import pytest
import pytest_asyncio
import torch

from baton.client import AsyncClient
from baton.client.events import Logprobs
from baton.finish_reason import FinishReason
from baton.v1 import common_pb2, router_pb2, router_pb2_grpc
from engine.request import SampledToken, SamplingParams
from tests.engine import families
from tests.engine.driving import random_prompt
from tests.path.oracles import greedy_tokens, ids_of, oracle_model
from tests.path.whole_path import Answer, Pool, Shape, WholePath, ask, whole_path

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = random_prompt(83, families.VOCAB, 5)
CONTEXT = 2048
# As float32, which is what the wire carries.
SAMPLED: dict[str, Any] = {
    "temperature": float(np.float32(0.8)),
    "top_k": 200,
    "top_p": float(np.float32(0.9)),
    "min_p": 2.0**-8,
    "repetition_penalty": float(np.float32(1.15)),
    "presence_penalty": float(np.float32(0.4)),
    "frequency_penalty": float(np.float32(0.3)),
    "max_tokens": 24,
}


@pytest.fixture(scope="module")
def greedy() -> list[int]:
    """What the model says to PROMPT when nothing ends it."""
    return greedy_tokens("llama", (), PROMPT, 40)


@pytest.fixture(scope="module")
def eos(greedy: list[int]) -> int:
    """A token that comes up in the middle of the answer for the first time."""
    return next(
        token for index, token in enumerate(greedy) if index >= 7 and token not in greedy[:index]
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, eos: int) -> AsyncIterator[WholePath]:
    shape = Shape("llama", decode=(Pool(tp=2, chunk=32),), eos=eos)
    async with whole_path(shape, tmp_path_factory.mktemp("served")) as path:
        yield path


@pytest_asyncio.fixture(loop_scope="module")
async def path(served: WholePath) -> AsyncIterator[WholePath]:
    """The fleet, idle before and after each test."""
    yield served
    await served.until_idle()


def alone(path: WholePath, **sampling: Any) -> list[SampledToken]:
    params = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | sampling))
    return path.alone([PROMPT], params)[0]


def text_of(ids: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in ids)


def assert_close(found: Sequence[Logprobs], expected: Sequence[Logprobs]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.rank == other.rank
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=1e-4)


# --- seeds --------------------------------------------------------------------------------------


async def test_a_seed_gives_the_same_tokens_on_any_workers_in_any_company(path: WholePath) -> None:
    expected = alone(path, seed=7, logprobs=3, **SAMPLED)
    asked: dict[str, Any] = {"seed": 7, "logprobs": 3, **SAMPLED}
    answers = [
        await ask(router, PROMPT, cache_salt=salt, **asked)
        for salt, router in (
            ("one", path.far),
            ("one", path.far_again),  # from cached blocks
            ("two", path.near),
            ("two", path.near),
            ("three", path.far_again),
        )
    ]
    assert answers[1].num_cached_tokens == answers[3].num_cached_tokens == 80
    seeds = [7, *range(100, 106)]
    for router in (path.far, path.near):
        crowd = await asyncio.gather(
            *(
                ask(router, prompt, cache_salt="four", **(asked | {"seed": seed}))
                for seed in seeds
                for prompt in (PROMPT, random_prompt(10 + seed, families.VOCAB, seed))
            )
        )
        answers.append(crowd[0])
        of_prompt = {tuple(answer.ids) for answer in crowd[::2]}
        assert len(of_prompt) == len(seeds), "other seeds, other tokens"
    for answer in answers:
        assert answer.ids == ids_of(expected)
        assert_close(answer.logprobs, answers[0].logprobs)
    assert ids_of(expected) != ids_of(alone(path, max_tokens=SAMPLED["max_tokens"]))


async def test_the_seed_a_router_draws_is_reported_and_repeats_the_answer_anywhere(
    path: WholePath,
) -> None:
    first = await ask(path.far, PROMPT, **SAMPLED)
    second = await ask(path.far, PROMPT, **SAMPLED)
    assert first.routed[0].seed != second.routed[0].seed
    assert first.ids != second.ids
    for router in (path.far_again, path.near):
        again = await ask(router, PROMPT, seed=first.routed[0].seed, **SAMPLED)
        assert again.ids == first.ids


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 20}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.7, "temperature": 1.5}, {}],
    ids=["top-k", "min-p", "all", "none"],
)
async def test_filters_choose_the_same_tokens_on_any_workers(
    path: WholePath, filters: dict[str, float]
) -> None:
    asked: dict[str, Any] = {
        name: float(np.float32(value)) if isinstance(value, float) else value
        for name, value in ({"temperature": 1.0} | filters).items()
    }
    expected = ids_of(alone(path, seed=11, max_tokens=24, **asked))
    for router in (path.far, path.near):
        answer = await ask(router, PROMPT, seed=11, max_tokens=24, **asked)
        assert answer.ids == expected


# --- log-probabilities --------------------------------------------------------------------------


async def test_logprobs_are_those_of_transformers_wherever_a_token_is_computed(
    path: WholePath, greedy: list[int]
) -> None:
    num_tokens = 20
    with torch.inference_mode():
        logits = (
            oracle_model("llama")(torch.tensor([PROMPT + greedy[:num_tokens]])).logits[0].float()
        )
    reference = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = []
    for row, token in zip(reference, greedy):
        top = row.topk(4)
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist()))
        expected.append(Logprobs(float(row[token]), 1, pairs))
    for router in (path.far, path.near):
        answer = await ask(router, PROMPT, max_tokens=num_tokens, logprobs=4)
        assert answer.ids == greedy[:num_tokens]
        assert_close(answer.logprobs, expected)


async def test_logprobs_come_only_when_they_are_asked_for(path: WholePath) -> None:
    for router in (path.far, path.near):
        assert (await ask(router, PROMPT)).logprobs == []
        answer = await ask(router, PROMPT, logprobs=0)
        assert [len(entry.top) for entry in answer.logprobs] == [0] * 12
        assert all(entry.logprob < 0 and entry.rank == 1 for entry in answer.logprobs)


async def test_a_prompt_s_logprobs_are_those_of_transformers_and_share_no_cache(
    path: WholePath,
) -> None:
    prompt = random_prompt(83, families.VOCAB, 77)
    with torch.inference_mode():
        rows = oracle_model("llama")(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    expected = rows[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    request = router_pb2.GenerateRequest(
        token_ids=router_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(prompt_logprobs=2, max_tokens=3),
    )
    for address in path.addresses:
        async with grpc.aio.insecure_channel(address) as channel:
            responses = router_pb2_grpc.RouterServiceStub(channel).Generate(request)
            found = [known async for each in responses for known in each.tokens.logprobs]
        assert [len(known.prompt) for known in found] == [82, 0, 0]
        assert [known.logprob for known in found[0].prompt] == pytest.approx(expected, abs=1e-4)
    cached = [(await ask(path.far, prompt)).num_cached_tokens for _ in range(2)]
    assert cached == [0, 80]
    async with openai.AsyncOpenAI(base_url=path.far_over_http.url, api_key="any") as client:
        answer = await client.completions.create(
            model="", prompt=prompt, echo=True, logprobs=3, max_tokens=0,
            extra_body={"prompt_logprobs": 2},
        )  # fmt: skip
    choice, usage = answer.choices[0], answer.usage
    assert (usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (0, 0)
    assert choice.text == text_of(prompt)
    assert choice.logprobs.token_logprobs == [None, *(pytest.approx(p, abs=1e-4) for p in expected)]
    assert [len(each or ()) >= 3 for each in choice.logprobs.top_logprobs] == [False] + [True] * 82
    for token, logprob, told in zip(prompt[1:], expected, choice.prompt_logprobs[1:], strict=True):
        assert told[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert sorted(each["rank"] for each in told.values())[:2] == [1, 2]


# --- ends ---------------------------------------------------------------------------------------


def assert_ended(
    answer: Answer, ids: Sequence[int], text: str, reason: FinishReason, stop: str = ""
) -> None:
    assert answer.finished is not None
    assert (answer.ids, answer.text) == (list(ids), text)
    assert (answer.finished.reason, answer.finished.stop) == (reason, stop)


@pytest.fixture(params=["far", "near"])
def router(request: pytest.FixtureRequest, path: WholePath) -> AsyncClient:
    client: AsyncClient = getattr(path, request.param)
    return client


async def test_a_request_for_one_token_ends_where_its_prompt_was_computed(
    path: WholePath, router: AsyncClient, greedy: list[int]
) -> None:
    answer = await ask(router, PROMPT, max_tokens=1, cache_salt="one token")
    assert_ended(answer, greedy[:1], text_of(greedy[:1]), FinishReason.LENGTH)
    assert answer.handed_off is None
    crowd = await asyncio.gather(*(ask(router, PROMPT[n:], max_tokens=1) for n in range(8)))
    expected = [path.greedy(PROMPT[n:], 1) for n in range(8)]
    assert [one.ids for one in crowd] == expected


@pytest.mark.parametrize("index", [0, 1, 6])
async def test_a_stop_token_ends_the_answer_and_is_no_part_of_its_text(
    router: AsyncClient, greedy: list[int], index: int
) -> None:
    assert greedy[index] not in greedy[:index]
    answer = await ask(router, PROMPT, stop_token_ids=[greedy[index]])
    text = text_of(greedy[:index])
    assert_ended(answer, greedy[: index + 1], text, FinishReason.STOP, str(greedy[index]))
    if index == 0:
        assert answer.handed_off is None


async def test_a_stop_string_across_tokens_ends_the_answer_before_it(
    router: AsyncClient, greedy: list[int]
) -> None:
    stop = f"{greedy[4]} w{greedy[5]}"
    whole = text_of(greedy[:6])
    assert whole.index(stop) == len(whole) - len(stop)
    answer = await ask(router, PROMPT, stop=["never said", stop], max_tokens=30)
    before = whole.removesuffix(stop)
    assert_ended(answer, greedy[:6], before, FinishReason.STOP, stop)


async def test_the_end_of_sequence_ends_an_answer_unless_it_is_ignored_or_too_early(
    path: WholePath, router: AsyncClient, greedy: list[int], eos: int
) -> None:
    end = greedy.index(eos)
    answer = await ask(router, PROMPT, ignore_eos=None, max_tokens=30)
    assert_ended(answer, greedy[: end + 1], text_of(greedy[:end]), FinishReason.STOP, str(eos))
    answer = await ask(router, PROMPT, max_tokens=30)
    assert_ended(answer, greedy[:30], text_of(greedy[:30]), FinishReason.LENGTH)
    least = end + 4
    late = ids_of(alone(path, ignore_eos=False, min_tokens=least, max_tokens=least))
    assert eos not in late
    answer = await ask(router, PROMPT, ignore_eos=None, min_tokens=least, max_tokens=least)
    assert_ended(answer, late, text_of(late), FinishReason.LENGTH)


async def test_an_answer_ends_with_the_context(path: WholePath, router: AsyncClient) -> None:
    prompt = random_prompt(CONTEXT - 9, families.VOCAB, 1)
    answer = await ask(router, prompt, max_tokens=None)
    expected = path.greedy(prompt, 9)
    assert_ended(answer, expected, text_of(expected), FinishReason.LENGTH)
