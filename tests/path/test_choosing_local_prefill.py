"""`local_prefill: auto`, the default: cost says where a prompt is prefilled, and its tokens are the
oracle's either way."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from baton.client import AsyncClient
from baton.v1 import router_pb2
from tests.engine import families
from tests.engine.driving import random_prompt
from tests.path.whole_path import Pool, Shape, WholePath, another_router, ask, whole_path

SALT = "auto"
HELD = 400  # tokens of the prefix that the decode worker holds


def after_prefix(number: int) -> list[int]:
    """A few tokens after the prefix that all of them begin with."""
    return random_prompt(HELD, families.VOCAB, 1) + random_prompt(9, families.VOCAB, number)


@contextlib.asynccontextmanager
async def prompts_in_line(path: WholePath) -> AsyncIterator[None]:
    """Long prompts of other clients, which the decode worker prefills one after the other."""

    async def keep_asking(client: int) -> None:
        for number in itertools.count(1000 * client):
            await ask(path.near, random_prompt(1500, families.VOCAB, number), max_tokens=1)

    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(keep_asking(client)) for client in range(1, 9)]
        yield
        for client in clients:
            client.cancel()


async def until_cheapest(
    router: AsyncClient,
    prompt: Sequence[int],
    is_so: Callable[[router_pb2.RouteCandidate], bool],
) -> None:
    """What a router chooses by comes from other processes."""
    request = router_pb2.GenerateRequest(cache_salt=SALT)
    request.token_ids.ids[:] = prompt
    async with asyncio.timeout(30):
        while not is_so((await router.explain(request)).candidates[0]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_auto_prefills_where_the_prefix_is_held_unless_that_worker_is_busy(
    tmp_path: Path,
) -> None:
    shape = Shape("qwen3", decode=(Pool(chunk=16),))
    async with whole_path(shape, tmp_path) as path, another_router(path, "auto") as auto:
        # Both workers' speeds are known, and nobody holds what follows.
        for router in (path.far, path.near):
            await ask(router, random_prompt(300, families.VOCAB, 2), cache_salt="measured")

        unknown = after_prefix(3)
        answer = await ask(auto, unknown, cache_salt="unknown", logprobs=0)
        assert answer.routed[0].prefill_worker == "prefill-tp1-0"
        assert answer.handed_off is not None
        assert answer.greedy == path.greedy_answer(unknown, 12)

        await ask(path.near, after_prefix(4), cache_salt=SALT)
        await until_cheapest(auto, after_prefix(5), lambda c: c.num_cached_tokens_decode == HELD)
        answer = await ask(auto, after_prefix(5), cache_salt=SALT, logprobs=0)
        assert answer.routed[0].prefill_worker == ""
        assert answer.handed_off is None
        assert answer.num_cached_tokens >= HELD - shape.block_size
        assert answer.greedy == path.greedy_answer(after_prefix(5), 12)

        async with prompts_in_line(path):
            await until_cheapest(auto, after_prefix(6), lambda c: c.prefill_worker != "")
            answer = await ask(auto, after_prefix(6), cache_salt=SALT, logprobs=0)
        assert answer.routed[0].prefill_worker == "prefill-tp1-0"
        assert answer.routed[0].num_cached_tokens_decode == HELD
        assert answer.handed_off is not None
        assert answer.greedy == path.greedy_answer(after_prefix(6), 12)
