"""Greedy tokens in fp32 are those of transformers, wherever they are computed: by an engine alone,
on one worker, or on two with the KV moved between them; from nothing or from cached blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.client import AsyncClient
from tests.engine import checkpoints
from tests.engine.driving import random_prompt
from tests.path.whole_path import Answer, Shape, WholePath, ask, greedy_alone, whole_path

NUM_TOKENS = 12
LENGTHS = (1, 2, 16, 17, 70, 333, 1500)
ALL_LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 128, 200, 511, 512, 513, 900, 1500)


async def ask_all(
    router: AsyncClient, prompts: Sequence[Sequence[int]], salt: str, **options: int
) -> list[Answer]:
    asked = {"max_tokens": NUM_TOKENS, **options}
    return await asyncio.gather(*(ask(router, p, cache_salt=salt, **asked) for p in prompts))


def whole_blocks(prompt: Sequence[int], path: WholePath) -> int:
    """Tokens of a prompt that a cache can hold: its last token is computed again, always."""
    return (len(prompt) - 1) // path.shape.block_size * path.shape.block_size


def handed_over_blocks(prompt: Sequence[int], path: WholePath) -> int:
    """Tokens of a prompt that its receiver can use again. It was given what the next token looks
    at: less than a prompt that ends a few tokens earlier needs, where a window is narrow."""
    cached, size = whole_blocks(prompt, path), path.shape.block_size
    for window in path.windows:
        if max(0, cached + 1 - window) // size < max(0, len(prompt) + 1 - window) // size:
            return 0
    return cached


def check_handed_off(answers: Sequence[Answer], cached: Sequence[int]) -> None:
    for answer, num_cached in zip(answers, cached):
        assert answer.routed[0].prefill_worker.startswith("prefill-")
        assert answer.handed_off is not None
        assert answer.handed_off.kv_bytes > 0
        assert answer.num_cached_tokens == num_cached


def check_local(answers: Sequence[Answer], cached: Sequence[int]) -> None:
    for answer, num_cached in zip(answers, cached):
        assert answer.routed[0].prefill_worker == ""
        assert answer.handed_off is None
        assert answer.num_cached_tokens == num_cached


async def check_tokens(path: WholePath, lengths: Sequence[int]) -> None:
    """All ways to the same tokens; a salt names a cache that starts empty on both workers."""
    prompts = [random_prompt(length, checkpoints.VOCAB, length) for length in lengths]
    expected = [checkpoints.greedy(path.model, prompt, NUM_TOKENS) for prompt in prompts]
    nothing = [0] * len(prompts)
    all_blocks = [whole_blocks(prompt, path) for prompt in prompts]
    received = [handed_over_blocks(prompt, path) for prompt in prompts]
    assert greedy_alone(path, prompts, NUM_TOKENS) == expected

    for salt, router, check, cached in (
        ("a", path.far, check_handed_off, nothing),
        ("a", path.far, check_handed_off, all_blocks),  # both workers hold the prompts
        ("a", path.near, check_local, received),  # from blocks that were handed over
        ("b", path.near, check_local, nothing),
        ("b", path.near, check_local, all_blocks),
        ("b", path.far, check_handed_off, nothing),  # only the decode worker holds them
        ("b", path.far_again, check_handed_off, all_blocks),
    ):
        answers = await ask_all(router, prompts, salt)
        assert [answer.ids for answer in answers] == expected, (salt, cached)
        check(answers, cached)
    await path.until_idle()


async def check_conversation(path: WholePath, length: int) -> None:
    """Each turn's prompt is the last one, its answer and more; the two workers take turns."""
    prompt = random_prompt(length, checkpoints.VOCAB, length + 1)
    for turn, router in enumerate((path.far, path.far, path.near, path.far)):
        answer = await ask(router, prompt, cache_salt="talk", max_tokens=40)
        assert answer.ids == checkpoints.greedy(path.model, prompt, 40), turn
        assert turn == 0 or answer.num_cached_tokens > 0
        prompt = prompt + answer.ids + random_prompt(9, checkpoints.VOCAB, turn)
    await path.until_idle()


# --- quick: what differs, pairwise --------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(
            Shape("qwen2", chunk=64, decode_chunk=16, checksum="always"), id="qwen2-mixed-windows"
        ),
        pytest.param(
            Shape("qwen3-moe", prefill_tp=2, decode_tp=1, chunk=512, block_size=8),
            id="qwen3-moe-tp-2-to-1",
        ),
        pytest.param(
            Shape("mistral", prefill_tp=1, decode_tp=2, chunk=16, decode_chunk=64),
            id="mistral-tp-1-to-2",
        ),
    ],
)
async def test_tokens_are_those_of_transformers_alone_local_and_handed_over(
    shape: Shape, tmp_path: Path
) -> None:
    async with whole_path(shape, tmp_path) as path:
        await check_tokens(path, LENGTHS)
        await check_conversation(path, 75)


# --- full: every combination --------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", [16, 64, 512])
@pytest.mark.parametrize(
    "widths", [(1, 1), (1, 2), (2, 1), (2, 2)], ids=lambda w: f"tp{w[0]}{w[1]}"
)
@pytest.mark.parametrize("family", list(checkpoints.FAMILIES))
async def test_every_family_chunk_and_width_gives_the_tokens_of_transformers(
    family: str, widths: tuple[int, int], chunk: int, tmp_path: Path
) -> None:
    # The block size goes round, so that each meets each family, chunk and width.
    number = list(checkpoints.FAMILIES).index(family) + sum(widths) + chunk // 64
    shape = Shape(
        family,
        *widths,
        chunk=chunk,
        block_size=(8, 16, 32)[number % 3],
        checksum=("off", "sampled", "always")[number // 3 % 3],
    )
    async with whole_path(shape, tmp_path) as path:
        await check_tokens(path, ALL_LENGTHS)
        await check_conversation(path, 75)
        await check_conversation(path, 600)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("widths", [(1, 2), (2, 1), (2, 2)], ids=lambda w: f"tp{w[0]}{w[1]}")
async def test_a_kv_head_held_by_every_rank_is_handed_over_once_and_read_by_all(
    widths: tuple[int, int], tmp_path: Path
) -> None:
    shape = Shape("llama", *widths, overrides=(("num_key_value_heads", 1),))
    async with whole_path(shape, tmp_path) as path:
        await check_tokens(path, LENGTHS)
        await check_conversation(path, 75)
