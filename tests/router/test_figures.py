"""What a router tells for planning."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.clock import ManualClock
from baton.v1 import control_pb2
from router.report.figures import (
    RATES_WINDOW_S,
    RECENT_S,
    WINDOW_S,
    Counts,
    Figures,
    PoolFigures,
    Waiting,
)
from tests.router.answers import PROMPT, ask_for
from tests.router.deployment import deployment


def figures() -> tuple[Figures, ManualClock]:
    clock = ManualClock(100.0)
    return Figures("router-1", clock.now_s), clock


def test_rates_are_those_of_the_last_seconds() -> None:
    told, clock = figures()
    counts = Counts()
    for _ in range(30):
        clock.advance(1.0)
        counts = replace(
            counts,
            num_arrivals=counts.num_arrivals + 2,
            prompt_tokens=counts.prompt_tokens + 200,
            prefilled_tokens=counts.prefilled_tokens + 200,
            cached_tokens=counts.cached_tokens + 50,
            num_ended=counts.num_ended + 1,
            output_tokens=counts.output_tokens + 64,
        )
        report = told.report(counts, [])
    assert report.requests_per_s == pytest.approx(2.0)
    assert report.uncached_tokens_per_s == pytest.approx(150.0)
    assert report.output_tokens == pytest.approx(64.0)


def test_nothing_that_arrives_is_exactly_nothing_after_the_window() -> None:
    told, clock = figures()
    counts = Counts(num_arrivals=5, prompt_tokens=500)
    told.report(counts, [])
    for _ in range(int(RATES_WINDOW_S) + 2):
        clock.advance(1.0)
        report = told.report(counts, [])
    assert report.requests_per_s == 0.0
    assert report.uncached_tokens_per_s == 0.0
    assert not report.HasField("output_tokens")


def test_queues_are_told_by_what_is_waited_for() -> None:
    told, _ = figures()
    waiting = [
        Waiting(100, 3.0, for_decode=False),
        Waiting(50, 1.0, for_decode=False),
        Waiting(10, 9.0, for_decode=True, is_held=True),
    ]
    report = told.report(Counts(), waiting)
    prefill, decode = report.waiting_for_prefill, report.waiting_for_decode
    assert (prefill.num_requests, prefill.num_tokens, prefill.oldest_wait_s) == (2, 150, 3.0)
    assert prefill.median_wait_s == 2.0
    assert (decode.num_requests, decode.num_tokens) == (1, 10)
    assert report.num_held == 1


async def test_a_router_counts_what_comes_in_and_tells_who_waits_for_which_worker() -> None:
    async with deployment(prefill=1, decode=1) as d:
        await d.client.ask(ask_for(PROMPT))
        counts = d.router.parts.counts
        assert (counts.num_arrivals, counts.num_ended) == (1, 1)
        assert counts.prompt_tokens == counts.prefilled_tokens == len(PROMPT)
        assert counts.output_tokens > 0
        d.router.fleet.arrays.max_running[:] = 0
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: len(d.router.admission) == 1)
        report = d.router.report()
        assert report.waiting_for_decode.num_requests == 1
        assert report.waiting_for_prefill == control_pb2.QueueFigures()
        assert report.num_held == 0
        d.router.fleet.arrays.max_running[:] = 16
        d.router.admission.kick()
        await asking


def test_each_pool_s_slowest_but_a_twentieth_are_told_for_a_minute() -> None:
    clock = ManualClock(100.0)
    figures = PoolFigures(clock.now_s)
    for number in range(100):
        figures.saw_first_token("prefill-a", number / 100)
        figures.saw_gap("decode-a", 0.01 if number < 94 else 0.5)
        clock.advance(0.1)
    decode, prefill = figures.report()
    assert (decode.pool, prefill.pool) == ("decode-a", "prefill-a")
    assert prefill.ttft_p95_s == pytest.approx(0.95)
    assert not prefill.HasField("itl_p95_s")
    assert decode.itl_p95_s == pytest.approx(0.5)
    clock.advance(WINDOW_S)
    assert figures.report() == []


def test_gaps_of_the_last_seconds_are_told_apart_and_how_many_they_are() -> None:
    clock = ManualClock(100.0)
    figures = PoolFigures(clock.now_s)
    for gap_s in (0.5, 0.02):
        for _ in range(200):
            figures.saw_gap("decode-a", gap_s)
            clock.advance(0.05)
    (decode,) = figures.report()
    assert decode.itl_p95_s == pytest.approx(0.5)
    assert decode.recent_itl_p95_s == pytest.approx(0.02)
    assert decode.num_recent_gaps == pytest.approx(200, abs=20)
    clock.advance(RECENT_S)
    (decode,) = figures.report()
    assert not decode.HasField("recent_itl_p95_s")
    assert decode.num_recent_gaps == 0


def test_a_second_in_which_little_was_seen_counts_for_little() -> None:
    clock = ManualClock(100.0)
    figures = PoolFigures(clock.now_s)
    for second in range(10):
        for _ in range(64 if second == 4 else 6400):
            figures.saw_gap("decode-a", 0.5 if second == 4 else 0.02)
        clock.advance(1.0)
    (decode,) = figures.report()
    assert decode.itl_p95_s == pytest.approx(0.02)


async def test_a_router_tells_what_clients_saw_of_the_pools_that_served_them() -> None:
    async with deployment(prefill=1, decode=1) as d:
        answer = await d.client.ask(ask_for(PROMPT))
        told = {each.pool: each for each in d.router.report().pools}
        assert told.keys() == {"prefill", "decode"}
        (prefilled,) = answer.prefilled
        assert told["prefill"].ttft_p95_s == pytest.approx(prefilled.ttft_ms / 1e3, rel=1e-3)
        assert told["decode"].itl_p95_s > 0
