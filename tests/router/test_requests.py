"""A request's way through the router when nothing goes wrong."""

from __future__ import annotations

from tests.router.answers import PROMPT, ask_for, assert_whole
from tests.router.deployment import deployment


async def test_a_prompt_is_prefilled_in_one_pool_and_streams_from_the_other() -> None:
    async with deployment() as d:
        answer = await d.client.ask(ask_for("Once upon a time"))
        assert_whole(answer, "Once upon a time")
        assert answer.routed[0].prefill_worker == "p0"
        assert answer.routed[0].decode_worker == "d0"
        assert answer.routed[0].seed == 7
        assert len(answer.prefilled) == 1
        assert answer.handed_off[0].kv_bytes > 0
        assert answer.finished is not None
        assert answer.finished.usage.num_prompt_tokens == 16
        assert answer.finished.usage.num_output_tokens == 12
        assert answer.finished.timings.ttft_ms > 0


async def test_a_first_token_that_ends_the_request_releases_the_lease() -> None:
    async with deployment() as d:
        answer = await d.client.ask(ask_for(PROMPT, 1))
        assert_whole(answer, PROMPT, 1)
        await d.check_empty()
        assert d.worker("d0").num_decode_steps == 0


async def test_a_mixed_fleet_serves_by_local_prefill_and_by_handoff() -> None:
    async with deployment(0, 0, mixed=2, local_prefill="auto") as d:
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
    async with deployment(0, 0, mixed=2, local_prefill="never") as d:
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert answer.routed[0].prefill_worker != answer.routed[0].decode_worker
    async with deployment(1, 1, local_prefill="always") as d:
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert answer.routed[0].prefill_worker == ""
        assert len(answer.prefilled) == 1
