"""What went wrong in other projects' planners, replayed: each test is named after its issue.

Times are seconds; the planner is called every 5 s, unless a test says otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.config.planner import PlannerConfig
from baton.fleet import WorkerState
from cluster.planner.signals import PoolSignals, Signals
from tests.cluster.planner.moments import (
    Planning,
    decode_pool,
    moment,
    prefill_pool,
    queue,
    router,
    with_workers,
    worker,
)

EVERY_S = 5.0


def follow(
    planning: Planning,
    sizes: dict[str, int],
    begin_s: float,
    for_s: float,
    look: Callable[[float, dict[str, int]], Signals],
) -> list[dict[str, int]]:
    """Let what is planned become true at once; the sizes after each call."""
    seen = []
    now_s = begin_s
    while now_s < begin_s + for_s:
        planning.see(look(now_s, sizes))
        sizes = {name: planning.desired(name) for name in sizes}
        seen.append(sizes)
        now_s += EVERY_S
    return seen


def test_dynamo_10528_queue_wait_counts_where_service_time_is_within_target() -> None:
    """The planner modelled a prompt's own prefill (0.4 s of a target of 3 s), so it kept one
    replica while clients waited 160 s for it."""
    planning = Planning(PlannerConfig(ttft_target_s=3.0))
    seen = router(
        100.0, tokens_per_s=20_000, prompt_tokens=8_000, for_prefill=queue(400, 160.0, 3_200_000)
    )
    planning.see(moment(100.0, seen, prefill_pool(100.0, 1, rate=20_000), decode_pool(100.0, 1)))
    assert planning.desired("prefill") >= 3
    assert "queue wait 160.0 s over target 3 s" in planning.reason("prefill")


def test_dynamo_10528_a_queue_counts_after_its_burst_is_over() -> None:
    planning = Planning()
    for now_s in (0.0, 5.0, 10.0, 15.0, 20.0):
        seen = router(now_s, tokens_per_s=100, for_prefill=queue(500, 100.0, 100_000))
        planning.see(moment(now_s, seen, prefill_pool(now_s, 1), decode_pool(now_s, 1)))
    assert planning.desired("prefill") == 2


def test_dynamo_10528_one_odd_request_that_waits_long_asks_for_nothing() -> None:
    """Such as one that no worker of the fleet takes, while all others pass it by."""
    planning = Planning()
    odd = replace(queue(20, 0.2, 80_000), oldest_wait_s=500.0)
    seen = router(0.0, tokens_per_s=500, for_prefill=odd)
    planning.see(moment(0.0, seen, prefill_pool(0.0, 1), decode_pool(0.0, 1)))
    assert planning.desired("prefill") == 1


def steady_decode(
    now_s: float, num_workers: int, tokens_per_s: float, kv_of_stream: float = 1 / 80
) -> PoolSignals:
    """A pool of which so many output tokens are wanted. A step takes 10 ms and 0.5 ms a stream, and
    streams last as long as their tokens take, 100 each with the KV of so much of a worker."""
    itl_s = 0.01 / max(0.05, 1 - 0.0005 * tokens_per_s / num_workers)
    streams = tokens_per_s * itl_s
    fill = streams * kv_of_stream
    return decode_pool(now_s, num_workers, streams=round(streams), fill=fill, itl_s=itl_s)


@pytest.mark.parametrize(
    ("itl_target_s", "kv_of_stream", "busy"),
    [(0.04, 1 / 80, 2_200), (0.03, 1 / 1_000, 1_400), (0.4, 1 / 44, 1_400)],
    ids=["too little of all", "tokens too far apart", "too little KV"],
)
@pytest.mark.parametrize("lull_s", [0.0, 100.0], ids=["constant", "in waves"])
def test_dynamo_9294_two_workers_whose_load_one_cannot_hold_stay_two(
    itl_target_s: float, kv_of_stream: float, busy: float, lull_s: float
) -> None:
    """Each was under 80% of its target, so one was let go, had twice the load, for its streams last
    longer, and was too few: 2, 1, 2 without end under a constant load. In waves: one would do in
    every lull, and not in what comes after it."""
    planning = Planning(PlannerConfig(itl_target_s=itl_target_s))

    def look(now_s: float, sizes: dict[str, int]) -> Signals:
        is_lull = now_s < 200 or now_s % 200 < lull_s
        decode = steady_decode(now_s, sizes["decode"], 1_000 if is_lull else busy, kv_of_stream)
        assert decode.workers[0].itl_s is not None
        assert sizes["decode"] != 2 or decode.workers[0].itl_s < 0.8 * itl_target_s
        seen = router(now_s, tokens_per_s=600 if is_lull else 1_200)
        return moment(now_s, seen, prefill_pool(now_s, sizes["prefill"]), decode)

    seen = follow(planning, {"prefill": 2, "decode": 2}, 0.0, 1_800.0, look)
    assert all(sizes == {"prefill": 2, "decode": 2} for sizes in seen)


def test_dynamo_9294_workers_whose_load_the_others_hold_do_leave() -> None:
    planning = Planning(PlannerConfig(itl_target_s=0.04))

    def look(now_s: float, sizes: dict[str, int]) -> Signals:
        decode = steady_decode(now_s, sizes["decode"], 1_000)
        return moment(now_s, router(now_s), prefill_pool(now_s, 1), decode)

    seen = follow(planning, {"prefill": 1, "decode": 3}, 0.0, 1_200.0, look)
    assert seen[-1]["decode"] == 1


def test_dynamo_11624_a_ttft_that_one_prompt_alone_misses_keeps_no_worker() -> None:
    """The floor of replicas was the predicted TTFT over its target, for a single request, which no
    second worker makes faster: so two stayed for ever after the traffic had ended."""
    planning = Planning(PlannerConfig(ttft_target_s=0.2))

    def look(now_s: float, sizes: dict[str, int]) -> Signals:
        rate = 3_000.0 if now_s < 600 else 0.0
        seen = router(now_s, tokens_per_s=rate, prompt_tokens=4_000)
        return moment(now_s, seen, prefill_pool(now_s, sizes["prefill"]), decode_pool(now_s, 1))

    seen = follow(planning, {"prefill": 1, "decode": 1}, 0.0, 3_000.0, look)
    busy = [sizes["prefill"] for sizes in seen[: int(600 / EVERY_S)]]
    assert max(busy) <= 10, "3 workers' worth of load"
    assert busy[-1] == busy[-2]
    assert seen[-1]["prefill"] == 1


def test_dynamo_11624_an_itl_that_one_stream_alone_misses_keeps_no_worker() -> None:
    planning = Planning(PlannerConfig(itl_target_s=0.02))

    def look(now_s: float, sizes: dict[str, int]) -> Signals:
        streams = 40 if now_s < 1_200 else 4
        itl_s = 0.03 + 0.0005 * streams / sizes["decode"]
        decode = decode_pool(now_s, sizes["decode"], streams=streams, fill=0.5, itl_s=itl_s)
        return moment(now_s, router(now_s), prefill_pool(now_s, 1), decode)

    seen = follow(planning, {"prefill": 1, "decode": 1}, 0.0, 3_000.0, look)
    assert seen[-1]["decode"] == 1
    assert "more workers cannot mend that" in planning.reason("decode")
    sizes = [moment["decode"] for moment in seen]
    turns = [b - a for a, b in itertools.pairwise(sizes) if a != b]
    assert all(turn < 0 for turn in turns[turns.index(-1) :]), "once learned, never asked again"


def test_dynamo_14251_a_pending_replica_holds_up_no_scale_in() -> None:
    """A decode pod found no GPU. The planner only observed for as long as the deployment was not
    ready: over an hour after the load had ended nothing had shrunk."""
    planning = Planning()

    def look(now_s: float, sizes: dict[str, int]) -> Signals:
        busy = now_s < 600
        num_live = min(2, sizes["decode"])
        decode = decode_pool(
            now_s, sizes["decode"], num_live=num_live, streams=40 * busy, fill=2.4 * busy
        )
        decode = replace(decode, num_pending=sizes["decode"] - num_live)
        seen = router(now_s, tokens_per_s=1_500.0 * busy)
        return moment(now_s, seen, prefill_pool(now_s, sizes["prefill"]), decode)

    seen = follow(planning, {"prefill": 2, "decode": 3}, 0.0, 1_800.0, look)
    assert all(sizes == {"prefill": 2, "decode": 3} for sizes in seen[: int(600 / EVERY_S)])
    assert seen[-1] == {"prefill": 1, "decode": 1}


def test_dynamo_14251_a_pending_replica_is_not_asked_for_twice() -> None:
    planning = Planning()
    for now_s in (0.0, 5.0, 10.0):
        decode = decode_pool(now_s, 3, num_live=2, streams=40, fill=1.9)
        pending = replace(decode, num_pending=1)
        planning.see(moment(now_s, router(now_s), prefill_pool(now_s, 1), pending))
        assert planning.desired("decode") == 3


def test_dynamo_12430_cold_workers_say_nothing_of_what_a_worker_can_do() -> None:
    """New workers' first steps, slow and with a backlog, went into the capacity model: the capacity
    fell, and far more workers were asked for than the load needed."""
    for slowness in (1.0, 10.0):
        planning = Planning()
        for now_s in (0.0, 5.0, 10.0, 15.0, 20.0, 25.0):
            prefill = with_workers(
                prefill_pool(now_s, 6, num_live=2),
                *(
                    worker(f"new-{i}", now_s, live_for_s=now_s, rate=1_000 / slowness)
                    for i in range(4)
                ),
            )
            decode = with_workers(
                decode_pool(now_s, 6, num_live=2, streams=40, fill=0.8, itl_s=0.04),
                *(
                    worker(
                        f"new-{i}",
                        now_s,
                        live_for_s=now_s,
                        streams=30,
                        kv_use=0.5,
                        itl_s=0.04 * slowness,
                    )
                    for i in range(4)
                ),
            )
            planning.see(moment(now_s, router(now_s, tokens_per_s=4_000), prefill, decode))
            assert (planning.desired("prefill"), planning.desired("decode")) == (6, 6)
        assert "at 1,000 tokens/s" in planning.reason("prefill")
        assert "ITL 40.0 ms" in planning.reason("decode")


def test_dynamo_12430_what_cold_workers_hold_is_load_all_the_same() -> None:
    planning = Planning()
    cold = (worker(f"new-{i}", 0.0, live_for_s=5.0, streams=30, kv_use=1.0) for i in range(3))
    decode = with_workers(decode_pool(0.0, 3, num_live=0), *cold)
    planning.see(moment(0.0, router(0.0), prefill_pool(0.0, 1), decode))
    assert planning.desired("decode") == 4


def test_dynamo_4420_the_planner_goes_by_the_size_that_the_cluster_has() -> None:
    """Somebody scaled the workers; the planner compared its wish with another object's replicas,
    found it there already, and skipped, for ever."""
    planning = Planning()
    quiet = {"prefill": 1, "decode": 1}

    def look(now_s: float, sizes: dict[str, int]) -> Signals:
        pools = prefill_pool(now_s, sizes["prefill"]), decode_pool(now_s, sizes["decode"])
        return moment(now_s, router(now_s), *pools)

    assert follow(planning, quiet, 0.0, 600.0, look)[-1] == quiet
    by_hand = {"prefill": 3, "decode": 2}
    assert follow(planning, by_hand, 600.0, 300.0, look)[-1] == quiet


def test_dynamo_4420_a_plan_that_was_not_applied_is_planned_again() -> None:
    planning = Planning()
    for now_s in (0.0, 5.0, 10.0, 60.0):
        seen = router(now_s, tokens_per_s=2_900)
        planning.see(moment(now_s, seen, prefill_pool(now_s, 2), decode_pool(now_s, 1)))
        assert planning.desired("prefill") == 4


def test_dynamo_13565_a_drain_is_neither_hurried_nor_made_up_for() -> None:
    """Scale-in aborted what still ran after 5 s (#13559): a worker that leaves has streams for
    minutes. It is not one too many meanwhile, and not one too few."""
    planning = Planning()

    def pools(now_s: float, desired: int) -> tuple[PoolSignals, PoolSignals]:
        decode = decode_pool(now_s, desired, num_live=2, streams=60, fill=1.3)
        leaving = worker(
            "decode-2", now_s, state=WorkerState.DRAINING, streams=200, kv_use=1.0, itl_s=0.2
        )
        return prefill_pool(now_s, 1), with_workers(decode, leaving)

    for now_s in range(0, 1_800, 5):
        planning.see(moment(float(now_s), router(float(now_s)), *pools(float(now_s), 2)))
        assert planning.desired("decode") == 2, now_s


@pytest.mark.parametrize("who", ["routers", "workers", "all"])
def test_llm_d_autoscaling_380_stale_figures_of_a_full_pool_add_no_worker(who: str) -> None:
    """What was scraped last, of pods long gone, said "saturated", and was believed: without any
    load there was scale-up after scale-up."""
    planning = Planning()
    for now_s in (100.0, 105.0, 110.0):
        decode = decode_pool(now_s, 2, streams=512, fill=2.0, itl_s=0.5)
        old = tuple(replace(each, measured_at_s=40.0) for each in decode.workers)
        if who != "routers":
            decode = replace(decode, workers=old)
        seen = router(now_s, tokens_per_s=50_000, for_decode=queue(900, 60.0, 90_000))
        if who != "workers":
            seen = replace(seen, measured_at_s=40.0)
        planning.see(moment(now_s, seen, prefill_pool(now_s, 2), decode))
        assert planning.desired("decode") == 2
    assert "has reported within 15 s" in planning.reason("decode")


def test_llm_d_autoscaling_380_stale_figures_remove_no_worker_either() -> None:
    planning = Planning()

    def look(now_s: float, sizes: dict[str, int]) -> Signals:
        seen = router(min(now_s, 250.0))
        pools = prefill_pool(now_s, sizes["prefill"]), decode_pool(now_s, sizes["decode"])
        return moment(now_s, seen, *pools)

    seen = follow(planning, {"prefill": 3, "decode": 3}, 0.0, 1_200.0, look)
    assert seen[-1] == {"prefill": 3, "decode": 3}


def unready(now_s: float) -> list[PoolSignals]:
    """Two decode pools with three workers that are heard, and one that tells nothing: still loading
    in the one, live but silent in the other."""
    loading = worker("decode-3", now_s, age_s=1_000.0, state=WorkerState.STARTING)
    silent = worker("decode-3", now_s, age_s=1_000.0)
    return [
        with_workers(decode_pool(now_s, 4, num_live=3, streams=42, fill=0.2), loading),
        with_workers(decode_pool(now_s, 4, num_live=3, streams=42, fill=0.2), silent),
    ]


@pytest.mark.parametrize("which", [0, 1], ids=["loading", "silent"])
def test_aibrix_617_one_unready_worker_does_not_stop_the_pool_from_shrinking(which: int) -> None:
    """Figures of one pod could not be fetched, so the whole pool was left alone."""
    planning = Planning()
    for now_s in range(0, 330, 5):
        pool = unready(float(now_s))[which]
        planning.see(moment(float(now_s), router(float(now_s)), prefill_pool(now_s, 1), pool))
    assert planning.desired("decode") == 3


@pytest.mark.parametrize("which", [0, 1], ids=["loading", "silent"])
def test_aibrix_617_one_unready_worker_does_not_stop_the_pool_from_growing(which: int) -> None:
    planning = Planning()
    pool = unready(0.0)[which]
    full = tuple(replace(each, kv_use=1.0, num_streams=256) for each in pool.workers[:3])
    pool = replace(pool, workers=(*full, *pool.workers[3:]))
    seen = router(0.0, for_decode=queue(500, 9.0, 100_000))
    planning.see(moment(0.0, seen, prefill_pool(0.0, 1), pool))
    assert planning.desired("decode") > 4


def test_kthena_1589_what_runs_is_held_by_those_that_stay_and_leaves_one_by_one() -> None:
    """Scale-in deleted pods with requests in them. Here the drain is the worker's own; the planner
    lets go one at a time, and only as long as the others have room for every stream of now."""
    planning = Planning()
    leaving: list[str] = []

    def look(now_s: float, sizes: dict[str, int]) -> Signals:
        decode = decode_pool(now_s, sizes["decode"], streams=120, fill=1.2)
        draining = (
            worker(name, now_s, state=WorkerState.DRAINING, streams=30, kv_use=0.3)
            for name in leaving
        )
        pools = prefill_pool(now_s, 1), with_workers(decode, *draining)
        return moment(now_s, router(now_s), *pools)

    now_s, sizes, shrunk_at_s = 0.0, 4, []
    while now_s < 1_800:
        planning.see(look(now_s, {"decode": sizes}))
        left = sizes - planning.desired("decode")
        assert left in (0, 1)
        if left:
            shrunk_at_s.append(now_s)
            leaving.append(f"decode-{sizes - 1}")
        sizes -= left
        now_s += EVERY_S
    assert sizes == 2, "1.2 workers' worth of KV at 80% each, with margin"
    assert shrunk_at_s[1] - shrunk_at_s[0] >= planning.config.scale_in_hold_s
