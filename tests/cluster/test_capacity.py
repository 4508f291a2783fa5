"""What a worker registers of its memory, and a router that goes by it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from baton.config.engine import FakeEngineConfig
from baton.v1 import common_pb2, router_pb2
from cluster.pools.role_plan import Role
from tests.router.real_workers import Listed, router_over


async def test_a_request_without_max_tokens_runs_where_memory_holds_less_than_the_context(
    kit: Any,
) -> None:
    small = dataclasses.replace(
        kit.engine, num_blocks=20, fake=FakeEngineConfig(vocab_size=257, max_model_len=4096)
    )
    longest = 19 * 8 + 1
    async with (
        kit.running_worker("p0", Role.PREFILL, small) as prefill,
        kit.running_worker("d0", Role.DECODE, small) as decode,
    ):
        listed = [Listed(worker, worker.address) for worker in (prefill, decode)]
        async with router_over(*listed) as (router, client):
            request = router_pb2.GenerateRequest(
                token_ids=router_pb2.TokenIds(ids=range(20)),
                sampling=common_pb2.SamplingParams(temperature=0.0, ignore_eos=True),
                seed=7,
            )
            answers = await asyncio.gather(*(client.ask(request) for _ in range(2)))
            assert router.fleet.num_bookings == 0
        for answer in answers:
            assert len(answer.ids) == longest - 20
        assert answers[0].ids == answers[1].ids
        await kit.nothing_held(prefill, decode)
        info = decode.info()
        assert (info.num_blocks, info.max_model_len, info.max_request_tokens) == (19, longest, 152)
        assert info.max_held_tokens_per_request == 0
