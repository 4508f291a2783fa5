"""The same tokens when there is too little room for all at once, and when clients leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.request import SampledToken, SamplingParams
from tests.engine import families
from tests.engine.driving import random_prompt
from tests.path.oracles import ids_of
from tests.path.whole_path import Answer, Pool, Shape, WholePath, ask, whole_path

NUM_TOKENS = 70


def sampling_of(number: int) -> dict[str, Any]:
    """Greedy for even numbers; all values are exact in float32, which is what the wire carries."""
    if number % 2 == 0:
        return {"temperature": 0.0, "max_tokens": NUM_TOKENS, "logprobs": 1, "seed": number}
    return {
        "temperature": 0.75,
        "top_p": 0.875,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.125,
        "max_tokens": NUM_TOKENS,
        "logprobs": 1,
        "seed": number,
    }


def expected_tokens(path: WholePath, prompts: Sequence[Sequence[int]]) -> list[list[SampledToken]]:
    """What an engine with room for all says; greedy ones are those of transformers."""
    sampling = [SamplingParams(ignore_eos=True, **sampling_of(n)) for n in range(len(prompts))]
    found = path.alone(prompts, sampling)
    for tokens, prompt in list(zip(found, prompts))[::2]:
        assert ids_of(tokens) == path.greedy(prompt, NUM_TOKENS)
    return found


def assert_answers(answer: Answer, expected: Sequence[SampledToken]) -> None:
    assert answer.ids == ids_of(expected)
    logprobs = [token.logprobs.logprob for token in expected if token.logprobs is not None]
    assert [entry.logprob for entry in answer.logprobs] == pytest.approx(logprobs, abs=1e-4)


async def test_more_requests_than_blocks_wait_or_are_preempted_and_keep_their_tokens(
    tmp_path: Path,
) -> None:
    # Twelve requests grow to 14 or 15 blocks each; 70 are there.
    shape = Shape("qwen3-windows", decode=(Pool(blocks=70),))
    async with whole_path(shape, tmp_path) as path:
        prompts = [random_prompt(150 + n, families.VOCAB, n) for n in range(12)]
        expected = expected_tokens(path, prompts)
        for routers in ((path.near, path.near), (path.far, path.far_over_http)):
            answers = await asyncio.gather(
                *(
                    ask(
                        routers[n // 2 % 2],
                        prompt,
                        cache_salt=str(n % 3),
                        tries=None,
                        **sampling_of(n),
                    )
                    for n, prompt in enumerate(prompts)
                )
            )
            for answer, tokens in zip(answers, expected):
                assert_answers(answer, tokens)
            await path.until_idle()


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_clients_that_leave_at_any_moment_change_nothing_for_the_others(
    tmp_path: Path,
) -> None:
    shape = Shape("qwen2", prefill=(Pool(replicas=2),), decode=(Pool(replicas=2, blocks=160),))
    async with whole_path(shape, tmp_path) as path:
        rng = np.random.default_rng(3)
        lengths = rng.integers(1, 400, 90).tolist()
        prompts = [random_prompt(length, families.VOCAB, n) for n, length in enumerate(lengths)]
        expected = expected_tokens(path, prompts)
        leaves_after = {n: float(rng.uniform(0.0, 4.0)) for n in range(0, 90, 3)}

        async def one(number: int) -> None:
            routers = (path.far, path.near, path.far_again, path.far_over_http)
            router = routers[number // 3 % 4]
            asked = ask(router, prompts[number], tries=None, **sampling_of(number))
            if number in leaves_after:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asked, leaves_after[number])
            else:
                assert_answers(await asked, expected[number])

        await asyncio.gather(*map(one, range(90)))
        await path.until_idle()
