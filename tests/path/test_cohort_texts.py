"""Two models of different tokenizers behind one router: each is asked in its own ids and answers in
its own words, as it would alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from baton.client import AsyncClient
from baton.events import Finished, Routed, Tokens
from router.cohort_texts import OWN
from router.router import Router
from tests.engine.checkpoints import VOCAB
from tests.path.oracles import greedy_tokens
from tests.path.test_cohorts import FAMILIES, NUM_REQUESTS, prompt_of, two_cohorts

NUM_TOKENS = 48


def id_of(number: int, cohort: str) -> int:
    """Of a word, by its number; the new model has its words the other way round."""
    return number if cohort == "old" else VOCAB - 1 - number


def reverse_words(checkpoint: Path) -> None:
    words = {f"w{number}": id_of(number, "new") for number in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(checkpoint / "tokenizer.json"))


async def answer_to(client: AsyncClient, number: int) -> tuple[str, str]:
    """The cohort that answered, and what it said."""
    prompt = " ".join(f"w{word}" for word in prompt_of(number))
    cohort, text, is_over = "", "", False
    async for event in client.generate(
        prompt,
        temperature=0.0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        request_id=f"request-{number}",
        timeout_s=300.0,
    ):
        match event:
            case Routed():
                cohort = event.cohort
            case Tokens():
                text += event.text
            case Finished():
                is_over = True
    assert is_over
    return cohort, text


async def until_read(router: Router) -> None:
    texts = router.fleet.texts
    async with asyncio.timeout(60):
        while texts.unread or texts.is_only(OWN):  # noqa: ASYNC110  no event
            await asyncio.sleep(0.05)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_every_stream_s_text_is_that_of_its_own_model_alone(tmp_path: Path) -> None:
    async with two_cohorts(tmp_path, reverse_words) as (_, router, client):
        await until_read(router)
        answers = await asyncio.gather(*(answer_to(client, n) for n in range(NUM_REQUESTS)))
    for number, (cohort, text) in enumerate(answers):
        prompt = [id_of(word, cohort) for word in prompt_of(number)]
        alone = greedy_tokens(FAMILIES[cohort], (), prompt, NUM_TOKENS)
        assert text.split() == [f"w{id_of(token_id, cohort)}" for token_id in alone]
    assert {cohort for cohort, _ in answers} == set(FAMILIES)
