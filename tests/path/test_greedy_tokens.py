"""Greedy tokens in fp32, and how likely each is, are those of transformers, wherever they
are computed: by an engine alone, on one worker, or on two with the KV moved between them; from
nothing or from cached blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from baton.client import AsyncClient
from engine.request import SamplingParams
from tests.engine import families
from tests.engine.driving import random_prompt
from tests.engine.greedy import Greedy
from tests.path.whole_path import Answer, Pool, Shape, WholePath, ask, whole_path

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 12
FEW_LENGTHS = (1, 16, 17, 70, 600)
ALL_LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 128, 200, 511, 512, 513, 900, 1500)


async def ask_all(router: AsyncClient, prompts: Sequence[Sequence[int]], salt: str) -> list[Answer]:
    return await asyncio.gather(
        *(ask(router, p, cache_salt=salt, max_tokens=NUM_TOKENS, logprobs=0) for p in prompts)
    )


def whole_blocks(prompt: Sequence[int], path: WholePath) -> int:
    """Tokens of a prompt that a cache can hold: its last token is computed again, always."""
    return (len(prompt) - 1) // path.shape.block_size * path.shape.block_size


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


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    return [random_prompt(length, families.VOCAB, length) for length in lengths]


def check_alone(path: WholePath, lengths: Sequence[int]) -> None:
    """One engine, all prompts in a batch; its tokens know nothing of widths."""
    prompts = prompts_of(lengths)
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    for chunk in path.shape.chunks:
        found = path.alone(prompts, greedy, chunk)
        assert [*map(Greedy.of, found)] == [path.greedy_answer(p, NUM_TOKENS) for p in prompts], (
            chunk
        )


async def check_tokens(path: WholePath, lengths: Sequence[int], salt: str) -> None:
    """All ways to the same tokens; a salt names a cache that starts empty on both workers."""
    prompts = prompts_of(lengths)
    expected = [path.greedy_answer(prompt, NUM_TOKENS) for prompt in prompts]
    nothing = [0] * len(prompts)
    all_blocks = [whole_blocks(prompt, path) for prompt in prompts]

    for cache, router, check, cached in (
        ("a", path.far, check_handed_off, nothing),
        ("a", path.far, check_handed_off, all_blocks),  # both workers hold the prompts
        ("a", path.near, check_local, all_blocks),  # from blocks that were handed over
        ("b", path.near, check_local, nothing),
        ("b", path.near, check_local, all_blocks),
        ("b", path.far, check_handed_off, nothing),  # only the decode worker holds them
        ("b", path.far_again, check_handed_off, all_blocks),
    ):
        answers = await ask_all(router, prompts, salt + cache)
        assert [answer.greedy for answer in answers] == expected, (cache, cached)
        check(answers, cached)
    await path.until_idle()


async def check_conversation(path: WholePath, length: int, salt: str) -> None:
    """Each turn's prompt is the last one, its answer and more; the two workers take turns."""
    prompt = random_prompt(length, families.VOCAB, length + 1)
    for turn, router in enumerate((path.far, path.far, path.near, path.far)):
        answer = await ask(router, prompt, cache_salt=salt, max_tokens=40, logprobs=0)
        assert answer.greedy == path.greedy_answer(prompt, 40), turn
        assert turn == 0 or answer.num_cached_tokens > 0
        prompt = prompt + answer.ids + random_prompt(9, families.VOCAB, turn)


async def check_conversations(path: WholePath, lengths: Sequence[int], salt: str) -> None:
    """One that begins with each length, all at once: they share steps, which take the time."""
    async with asyncio.TaskGroup() as group:
        for length in lengths:
            group.create_task(check_conversation(path, length, f"{salt} {length}"))
    await path.until_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[WholePath]:
    """A fleet with both roles."""
    async with whole_path(request.param, tmp_path_factory.mktemp("path")) as path:
        yield path


CHUNKS = (16, 64, 512)
BLOCK_SIZES = (8, 16, 32)
CHECKSUMS = ("off", "sampled", "always")


# --- quick: unequal widths, each chunk, block size and checksum -----------------------------------

# The other modules of this folder have whole paths of llama and qwen3.
QUICK_FAMILIES = ("mistral", "qwen2", "mixtral", "qwen3-moe", "gemma3")


def in_pairs(number: int) -> Shape:
    """Unequal widths, which show the most, in both directions; the other settings rotate."""
    prefill_tp, decode_tp = ((1, 2), (2, 1))[number % 2]
    return Shape(
        QUICK_FAMILIES[number],
        prefill=(Pool(prefill_tp, CHUNKS[number % 3]),),
        decode=(Pool(decode_tp, CHUNKS[(number + 1) % 3]),),
        block_size=BLOCK_SIZES[(number + 1) % 3],
        checksum=CHECKSUMS[number % 3],
    )


quick_fleets = pytest.mark.parametrize(
    "path",
    [pytest.param(in_pairs(number), id=family) for number, family in enumerate(QUICK_FAMILIES)],
    indirect=True,
    scope="module",
)


@quick_fleets
async def test_an_engine_alone_gives_the_tokens_of_transformers(path: WholePath) -> None:
    check_alone(path, FEW_LENGTHS)


@quick_fleets
async def test_tokens_local_and_handed_over_are_those_of_transformers(path: WholePath) -> None:
    await check_tokens(path, FEW_LENGTHS, "tokens")


@quick_fleets
async def test_turns_of_a_conversation_go_on_from_the_blocks_of_either_worker(
    path: WholePath,
) -> None:
    await check_conversations(path, [75], "talk")


# --- full: every combination --------------------------------------------------------------------


def combined(family: str, chunk: int, widths: tuple[int, int], **changes: Any) -> Shape:
    """A wider prefill has another chunk size. The block size rotates over families and chunks."""
    number = list(families.FAMILIES).index(family) + CHUNKS.index(chunk)
    prefill_tp, decode_tp = widths
    other = CHUNKS[(CHUNKS.index(chunk) + 1) % 3]
    return Shape(
        family,
        prefill=(Pool(prefill_tp, chunk if prefill_tp == 1 else other),),
        decode=(Pool(decode_tp, chunk),),
        block_size=BLOCK_SIZES[number % 3],
        checksum=CHECKSUMS[number // 3 % 3],
        **changes,
    )


WIDTHS = ((1, 1), (1, 2), (2, 1), (2, 2))
# Every rank holds the one KV head; it is handed over once.
ONE_KV_HEAD = [
    combined("llama", 64, widths, overrides=(("num_key_value_heads", 1),)) for widths in WIDTHS
]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "path",
    [
        combined(family, chunk, widths)
        for family in families.FAMILIES
        for chunk in CHUNKS
        for widths in WIDTHS
    ]
    + ONE_KV_HEAD,
    ids=str,
    indirect=True,
    scope="module",
)
async def test_every_family_chunk_and_width_gives_the_tokens_of_transformers(
    path: WholePath,
) -> None:
    if path.shape.is_narrow:
        check_alone(path, ALL_LENGTHS)
    await check_tokens(path, ALL_LENGTHS, "tokens")
    await check_conversations(path, [75, 600], "talk")
