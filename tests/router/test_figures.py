"""What a router reports of its requests, its line and its pools."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc.aio
import numpy as np
import pytest

from baton.clock import ManualClock
from baton.v1 import common_pb2, control_pb2, router_pb2, worker_pb2
from router.report.figures import (
    RATES_WINDOW_S,
    RECENT_S,
    WINDOW_S,
    Counts,
    Figures,
    PoolFigures,
    RequestFigures,
    Waiting,
)
from tests.router.answers import PROMPT, ask_for, assert_whole, error_of, error_reason
from tests.router.deployment import PREFILL, Deployment, deployment


def figures() -> tuple[Figures, ManualClock]:
    clock = ManualClock(100.0)
    return Figures("router-1", clock.now_s), clock


def test_rates_are_those_of_the_last_seconds() -> None:
    own, clock = figures()
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
        report = own.report(counts, [])
    assert report.requests_per_s == pytest.approx(2.0)
    assert report.uncached_tokens_per_s == pytest.approx(150.0)
    assert report.output_tokens == pytest.approx(64.0)


def test_nothing_that_arrives_is_exactly_nothing_after_the_window() -> None:
    own, clock = figures()
    counts = Counts(num_arrivals=5, prompt_tokens=500)
    own.report(counts, [])
    for _ in range(int(RATES_WINDOW_S) + 2):
        clock.advance(1.0)
        report = own.report(counts, [])
    assert report.requests_per_s == 0.0
    assert report.uncached_tokens_per_s == 0.0
    assert not report.HasField("output_tokens")


def test_queues_are_reported_by_what_is_waited_for() -> None:
    own, _ = figures()
    waiting = [
        Waiting(100, 3.0, for_decode=False),
        Waiting(50, 1.0, for_decode=False),
        Waiting(10, 9.0, for_decode=True, is_held=True),
    ]
    report = own.report(Counts(), waiting)
    prefill, decode = report.waiting_for_prefill, report.waiting_for_decode
    assert (prefill.num_requests, prefill.num_tokens, prefill.oldest_wait_s) == (2, 150, 3.0)
    assert prefill.median_wait_s == 2.0
    assert (decode.num_requests, decode.num_tokens) == (1, 10)
    assert report.num_held == 1


async def test_a_router_counts_what_comes_in_and_reports_who_waits_for_which_worker() -> None:
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


def test_each_pool_s_slowest_but_a_twentieth_are_reported_for_a_minute() -> None:
    clock = ManualClock(100.0)
    figures = PoolFigures(clock.now_s)
    for number in range(100):
        figures.saw_first_token("prefill-a", number / 100)
        figures.saw_gaps("decode-a", [0.01 if number < 94 else 0.5])
        clock.advance(0.1)
    decode, prefill = figures.report()
    assert (decode.pool, prefill.pool) == ("decode-a", "prefill-a")
    assert prefill.ttft_p95_s == pytest.approx(0.95)
    assert not prefill.HasField("itl_p95_s")
    assert decode.itl_p95_s == pytest.approx(0.5)
    clock.advance(WINDOW_S)
    assert figures.report() == []


def test_gaps_of_the_last_seconds_are_apart_and_how_many_they_are() -> None:
    clock = ManualClock(100.0)
    figures = PoolFigures(clock.now_s)
    for gap_s in (0.5, 0.02):
        for _ in range(200):
            figures.saw_gaps("decode-a", [gap_s])
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
            figures.saw_gaps("decode-a", [0.5 if second == 4 else 0.02])
        clock.advance(1.0)
    (decode,) = figures.report()
    assert decode.itl_p95_s == pytest.approx(0.02)


async def test_a_router_reports_what_clients_saw_of_the_pools_that_served_them() -> None:
    async with deployment(prefill=1, decode=1) as d:
        answer = await d.client.ask(ask_for(PROMPT))
        report = {each.pool: each for each in d.router.report().pools}
        assert report.keys() == {"prefill", "decode"}
        (prefilled,) = answer.prefilled
        assert report["prefill"].ttft_p95_s == pytest.approx(prefilled.ttft_ms / 1e3, rel=1e-3)
        assert report["decode"].itl_p95_s > 0


def test_figures_are_those_of_the_last_minute() -> None:
    clock = ManualClock(100.0)
    figures, pools = RequestFigures(clock.now_s), PoolFigures(clock.now_s)
    for second in range(90):
        clock.advance(1.0)
        pools.saw_gaps("decode-a", [0.01, 0.02])
        pools.saw_gaps("decode-b", [0.03])
        figures.ended(failed=second >= 60)
    clock.advance(0.5)
    report = figures.report(3, pools.median_gap_s())
    assert (report.num_requests, report.num_failures, report.num_active) == (60, 30, 3)
    assert report.itl_s == pytest.approx(0.02)
    clock.advance(WINDOW_S)
    assert figures.report(0, pools.median_gap_s()) == control_pb2.RequestFigures()


def test_requests_without_a_gap_are_reported_without_one() -> None:
    figures = RequestFigures(ManualClock(100.0).now_s)
    figures.ended(failed=True)
    assert not figures.report(0, None).HasField("itl_s")


def test_what_is_too_long_goes_by_first_tokens_and_is_remembered() -> None:
    clock = ManualClock(100.0)
    figures = RequestFigures(clock.now_s)
    assert figures.too_long_s(least_s=0.1) == 5.0
    assert figures.too_long_s(least_s=2.0) == 20.0
    for wait_s in (0.1, 3.0, 9.0):
        figures.saw_first_token(wait_s)
    figures.report(0, None)
    assert figures.too_long_s(least_s=0.1) == 30.0
    clock.advance(WINDOW_S + 1.0)  # everything hangs
    figures.report(0, None)
    assert figures.too_long_s(least_s=0.1) == 30.0


def test_what_clients_gave_up_on_is_reported_beside_what_ended() -> None:
    figures = RequestFigures(ManualClock(100.0).now_s)
    figures.abandoned()
    report = figures.report(0, None)
    assert (report.num_requests, report.num_failures, report.num_abandoned) == (0, 0, 1)


# --- a whole router -------------------------------------------------------------------------------


def reported(d: Deployment) -> control_pb2.RequestFigures:
    return d.router.report().requests


def num_counted(d: Deployment) -> tuple[int, int]:
    """(requests, failures)."""
    report = reported(d)
    return report.num_requests, report.num_failures


async def test_a_request_that_is_served_after_a_retry_is_no_failure() -> None:
    async with deployment() as d:
        assert num_counted(d) == (0, 0)
        d.worker("p0").faults.fail_prefills = 1
        assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)
        assert num_counted(d) == (1, 0)
        assert reported(d).itl_s > 0


async def test_a_stream_whose_last_worker_dies_is_a_failure() -> None:
    async with deployment(admission={"fleet_wait_s": 0.2}) as d:
        has_begun = asyncio.Event()
        d.worker("d0").on_token = lambda _: (d.worker("d0").may_decode.clear(), has_begun.set())[1]
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await has_begun.wait()
        await d.worker("d0").die()
        with pytest.raises(grpc.aio.AioRpcError, match="no decode worker is live") as lost:
            await asking
        assert error_reason(lost.value) == "UNAVAILABLE"
        assert num_counted(d) == (1, 1)


async def test_a_request_that_hangs_until_its_deadline_is_a_failure() -> None:
    async with deployment() as d:
        d.worker("p0").may_prefill.clear()
        assert (
            error_reason(await error_of(d.client.ask(ask_for(PROMPT, timeout_ms=300))))
            == "DEADLINE"
        )
        assert num_counted(d) == (1, 1)


@pytest.mark.parametrize(
    ("tokens_per_s", "is_judged"), [(20.0, False), (2000.0, True)], ids=["too short", "enough"]
)
async def test_a_deadline_in_which_nobody_could_have_served_a_request_is_no_failure(
    tokens_per_s: float, is_judged: bool
) -> None:
    """The worker that hangs has yet to report its speed: nothing is refused at once."""
    async with deployment() as d:
        await d.add_worker("p1", PREFILL)
        await d.connected(3)
        d.worker("p1").load = worker_pb2.WorkerLoad(prefill_tokens_per_s=tokens_per_s)
        await d.registry.publish()
        measured = d.router.fleet.arrays.prefill_measured_s
        await d.until(lambda: bool(np.isfinite(measured).any()))
        for name in ("p0", "p1"):
            d.worker(name).may_prefill.clear()
        assert (
            error_reason(await error_of(d.client.ask(ask_for(PROMPT, timeout_ms=200))))
            == "DEADLINE"
        )
        assert (reported(d).num_failures > 0) is is_judged


async def test_a_request_that_its_client_cancels_counts_nowhere() -> None:
    async with deployment() as d:
        d.worker("p0").may_prefill.clear()
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id="r")))
        await d.until(lambda: d.worker("p0").num_prefilling == 1)
        assert reported(d).num_active == 1
        await d.client.stub.Abort(router_pb2.AbortRequest(request_id="r"))
        answer = await asking
        assert answer.reason == common_pb2.FINISH_REASON_ABORTED
        report = reported(d)
        assert (report.num_requests, report.num_abandoned, report.num_active) == (0, 0, 0)


@pytest.mark.parametrize("hangs_before", ["first token", "next token"])
@pytest.mark.parametrize(("still_s", "is_counted"), [(3.0, False), (6.0, True)])
async def test_a_request_that_stood_still_until_its_client_gave_up_is_reported(
    hangs_before: str, still_s: float, is_counted: bool
) -> None:
    clock = ManualClock()
    async with deployment(clock=clock) as d:
        hangs_at_prefill = hangs_before == "first token"
        (d.worker("p0").may_prefill if hangs_at_prefill else d.worker("d0").may_decode).clear()
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id="r")))
        if hangs_at_prefill:
            await d.until(lambda: d.worker("p0").num_prefilling == 1)
        else:
            await d.until(lambda: any(run.log.ids for run in d.router.runs))
        clock.advance(still_s)
        await d.client.stub.Abort(router_pb2.AbortRequest(request_id="r"))
        assert (await asking).finished is not None
        assert (reported(d).num_abandoned > 0) is is_counted
