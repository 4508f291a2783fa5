"""A worker's first long prompt: nothing predicts it, and only the registry tells slow from hung."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from baton.clock import ManualClock
from tests.router.answers import Answer, ask_for, assert_whole
from tests.router.deployment import Deployment, deployment
from tests.router.scripted_worker import ScriptedWorker

LONG = "x" * 500


async def prefilling(d: Deployment) -> tuple[asyncio.Task[Answer], ScriptedWorker, ScriptedWorker]:
    """A long prompt's answer, the worker that computes it until it `may_prefill`, and another."""
    for name in ("p0", "p1"):
        d.worker(name).may_prefill.clear()
    asking = asyncio.create_task(d.client.ask(ask_for(LONG)))
    await d.until(lambda: d.worker("p0").num_prefilling + d.worker("p1").num_prefilling == 1)
    asked, other = ("p0", "p1") if d.worker("p0").num_prefilling else ("p1", "p0")
    d.worker(other).may_prefill.set()
    return asking, d.worker(asked), d.worker(other)


async def test_a_step_that_nothing_predicts_may_take_as_long_as_the_registry_lets_it() -> None:
    clock = ManualClock(100.0)
    async with deployment(prefill=2, clock=clock) as d:
        asking, asked, _ = await prefilling(d)
        clock.advance(119.0)
        asked.may_prefill.set()
        answer = await asking
        assert_whole(answer, LONG)
        assert [routed.prefill_worker for routed in answer.routed] == [asked.worker_id]


async def test_a_prompt_that_two_live_workers_have_lost_is_given_up_by_each_after_its_time() -> (
    None
):
    clock = ManualClock(100.0)
    async with deployment(prefill=2, clock=clock) as d:
        workers = [d.worker("p0"), d.worker("p1")]
        for worker in workers:
            worker.faults.hang_prefills = 1
        asking = asyncio.create_task(d.client.ask(ask_for(LONG)))
        for number in (1, 2):
            await d.until(lambda n=number: sum(w.num_prefills for w in workers) == n)  # type: ignore[misc]
            await d.until(lambda: sum(w.num_prefilling for w in workers) == 1)
            clock.advance(151.0)
        answer = await asking
        assert_whole(answer, LONG)
        assert len(answer.routed) == 3


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_what_a_worker_tells_of_its_speed_meanwhile_is_what_its_prompt_is_waited_for(
    is_given_up: bool,
) -> None:
    """500 tokens at 2 a second; and some time on top, after which the prompt is lost there."""
    clock = ManualClock(100.0)
    async with deployment(prefill=2, clock=clock, first_token_timeout_s=30.0) as d:
        asking, asked, other = await prefilling(d)
        asked.load.prefill_tokens_per_s = 2.0  # after its first chunk
        await d.registry.publish()
        await d.until(lambda: bool(np.isfinite(d.router.fleet.arrays.prefill_measured_s).any()))
        clock.advance(281.0 if is_given_up else 279.0)
        asked.may_prefill.set()
        answer = await asking
        assert_whole(answer, LONG)
        where = [asked, other] if is_given_up else [asked]
        assert [routed.prefill_worker for routed in answer.routed] == [w.worker_id for w in where]
