"""A worker's first long prompt: nothing predicts it, and only the registry tells slow from hung."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from router.text import TextModel
from tests.router.deployment import Answer, Deployment, ask_for, deployment
from tests.router.scripted_worker import ScriptedWorker
from tests.router.test_placement import Clock
from tests.router.test_requests import assert_whole

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


def wait(d: Deployment, clock: Clock, worker: ScriptedWorker, seconds: float) -> None:
    """Let a time pass in which the prompt's worker says nothing."""
    clock.now_s += seconds
    (link,) = (link for link in d.router.links if link.entry.facts.worker_id == worker.worker_id)
    for attempt in link.waiting:
        attempt._patience._on_timer()  # type: ignore[attr-defined]


async def test_a_step_that_nothing_predicts_may_take_as_long_as_the_registry_lets_it(
    text_model: TextModel,
) -> None:
    clock = Clock()
    async with deployment(text_model, prefill=2, clock=clock) as d:
        asking, asked, _ = await prefilling(d)
        wait(d, clock, asked, 119.0)
        asked.may_prefill.set()
        answer = await asking
        assert_whole(answer, LONG)
        assert [routed.prefill_worker for routed in answer.routed] == [asked.worker_id]
        await d.check_empty()


async def test_a_prompt_that_two_live_workers_have_lost_is_given_up_by_each_after_its_time(
    text_model: TextModel,
) -> None:
    clock = Clock()
    async with deployment(text_model, prefill=2, clock=clock) as d:
        workers = [d.worker("p0"), d.worker("p1")]
        for worker in workers:
            worker.faults.hang_prefills = 1
        asking = asyncio.create_task(d.client.ask(ask_for(LONG)))
        for number in (1, 2):
            await d.until(lambda n=number: sum(w.num_prefills for w in workers) == n)  # type: ignore[misc]
            await d.until(lambda: sum(w.num_prefilling for w in workers) == 1)
            (losing,) = (worker for worker in workers if worker.num_prefilling)
            wait(d, clock, losing, 151.0)
        answer = await asking
        assert_whole(answer, LONG)
        assert len(answer.routed) == 3
        await d.check_empty()


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_what_a_worker_tells_of_its_speed_meanwhile_is_what_its_prompt_is_waited_for(
    text_model: TextModel, is_given_up: bool
) -> None:
    """500 tokens at 2 a second; and some time on top, after which the prompt is lost there."""
    clock = Clock()
    async with deployment(text_model, prefill=2, clock=clock, first_token_timeout_s=30.0) as d:
        asking, asked, other = await prefilling(d)
        asked.load.prefill_tokens_per_s = 2.0  # after its first chunk
        await d.registry.publish()
        await d.until(lambda: bool(np.isfinite(d.router.fleet.arrays.prefill_measured_s).any()))
        wait(d, clock, asked, 281.0 if is_given_up else 279.0)
        asked.may_prefill.set()
        answer = await asking
        assert_whole(answer, LONG)
        where = [asked, other] if is_given_up else [asked]
        assert [routed.prefill_worker for routed in answer.routed] == [w.worker_id for w in where]
        await d.check_empty()
