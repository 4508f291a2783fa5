"""What is planned for single moments, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.config.planner import PlannerConfig
from baton.fleet import Role
from cluster.planner.signals import QueueSignals, Signals
from cluster.role_plan import RolePlan
from tests.cluster.planner.moments import (
    RATE,
    STABLE_S,
    Planning,
    decode_pool,
    moment,
    prefill_pool,
    queue,
    quiet,
    router,
)

# --- growing -------------------------------------------------------------------------------------


def test_prefill_grows_with_the_tokens_that_arrive_and_says_so_with_numbers() -> None:
    planning = Planning(PlannerConfig(ttft_target_s=0.5))
    seen = router(0.0, tokens_per_s=3_500, for_prefill=queue(12, 3.1, 4_800))
    planning.see(moment(0.0, seen, prefill_pool(0.0, 2), decode_pool(0.0, 1)))
    assert planning.reason("prefill") == (
        "prefill 2 -> 4: queue wait 3.1 s over target 0.5 s, 3,500 uncached tokens/s need 4.4 "
        "workers at 1,000 tokens/s"
    )


def test_prefill_has_more_to_spare_where_the_target_leaves_little_time_to_wait() -> None:
    """4 workers' worth of prompts that take 0.5 s each."""
    sizes = []
    for target_s in (5.0, 0.6):
        planning = Planning(PlannerConfig(ttft_target_s=target_s))
        seen = router(0.0, tokens_per_s=4_000, prompt_tokens=500)
        planning.see(moment(0.0, seen, prefill_pool(0.0, 4), decode_pool(0.0, 1)))
        sizes.append(planning.desired("prefill"))
    assert sizes == [5, 6]


def test_decode_grows_with_the_kv_that_streams_hold() -> None:
    planning = Planning()
    decode = decode_pool(0.0, 2, streams=40, fill=1.9)
    planning.see(moment(0.0, router(0.0), prefill_pool(0.0, 1), decode))
    assert planning.desired("decode") == 3
    assert "40 streams fill 95% of 2 workers" in planning.reason("decode")


def test_prefill_grows_when_the_kv_of_its_prompts_fills_it() -> None:
    """Such as prompts whose handoffs are slow."""
    planning = Planning()
    pool = prefill_pool(0.0, 2)
    full = tuple(replace(each, kv_use=0.95, num_streams=9) for each in pool.workers)
    planning.see(moment(0.0, router(0.0), replace(pool, workers=full), decode_pool(0.0, 1)))
    assert planning.desired("prefill") == 3
    assert "KV fills 1.9 of 2 workers, which needs 2.4" in planning.reason("prefill")


def test_decode_grows_where_streams_are_scarcer_than_kv() -> None:
    planning = Planning()
    decode = decode_pool(0.0, 1, streams=256, fill=0.1)
    planning.see(moment(0.0, router(0.0), prefill_pool(0.0, 1), decode))
    assert planning.desired("decode") == 2


def test_decode_grows_when_tokens_come_too_slowly() -> None:
    planning = Planning(PlannerConfig(itl_target_s=0.04))
    decode = decode_pool(0.0, 2, streams=40, fill=0.4, itl_s=0.06)
    planning.see(moment(0.0, router(0.0), prefill_pool(0.0, 1), decode))
    assert planning.desired("decode") == 3
    assert "ITL 60.0 ms over target 40 ms needs 3.0 workers" in planning.reason("decode")


def test_decode_grows_before_the_streams_are_there_when_arrivals_come_to_more() -> None:
    """10 requests/s of 100 tokens each are 1,000 tokens/s, also while 250 streams have 500."""
    planning = Planning(PlannerConfig(itl_target_s=1.0))
    decode = decode_pool(0.0, 2, streams=250, fill=1.0, itl_s=0.5)
    seen = replace(router(0.0, tokens_per_s=100, prompt_tokens=10), output_tokens=100.0)
    planning.see(moment(0.0, seen, prefill_pool(0.0, 1), decode))
    assert planning.desired("decode") == 3
    assert "room for 1,000 tokens/s needs 2.5 workers" in planning.reason("decode")


def test_a_single_moment_of_a_burst_counts_for_its_share_of_the_panic_window() -> None:
    planning = Planning()
    for now_s in (0.0, 5.0):
        seen = router(now_s, tokens_per_s=400)
        planning.see(moment(now_s, seen, prefill_pool(now_s, 1), decode_pool(now_s, 1)))
    seen = router(10.0, tokens_per_s=4_000)
    planning.see(moment(10.0, seen, prefill_pool(10.0, 1), decode_pool(10.0, 1)))
    assert planning.desired("prefill") == 2


def test_a_need_within_tolerance_adds_no_worker() -> None:
    planning = Planning()
    decode = decode_pool(0.0, 2, streams=40, fill=2 * 0.8 * 1.09)
    planning.see(moment(0.0, router(0.0), prefill_pool(0.0, 1), decode))
    assert planning.desired("decode") == 2


def test_a_pool_grows_by_a_step_beyond_what_has_started() -> None:
    planning = Planning(PlannerConfig(max_step_out=2))
    seen = router(0.0, tokens_per_s=10_000)
    planning.see(moment(0.0, seen, prefill_pool(0.0, 3), decode_pool(0.0, 1)))
    assert planning.desired("prefill") == 5
    assert "12 wanted, 2 more than have started at a time" in planning.reason("prefill")


def test_replicas_without_a_machine_make_no_room_for_further_steps() -> None:
    planning = Planning(PlannerConfig(max_step_out=2))
    prefill = replace(prefill_pool(0.0, 5, num_live=3), num_pending=2)
    planning.see(moment(0.0, router(0.0, tokens_per_s=10_000), prefill, decode_pool(0.0, 1)))
    assert planning.desired("prefill") == 5


def test_max_replicas_is_kept_and_named() -> None:
    planning = Planning()
    prefill = replace(prefill_pool(0.0, 2), max_replicas=3)
    planning.see(moment(0.0, router(0.0, tokens_per_s=4_000), prefill, decode_pool(0.0, 1)))
    assert planning.desired("prefill") == 3
    assert "max_replicas 3" in planning.reason("prefill")


def test_a_queue_asks_for_as_much_again_as_the_arrivals_and_one_worker_at_most() -> None:
    """Workers to come would stand idle once the queue is worked off."""
    planning = Planning(PlannerConfig(max_step_out=100))
    seen = router(0.0, tokens_per_s=2_000, for_prefill=queue(90_000, 600.0, 9_000_000))
    planning.see(moment(0.0, seen, prefill_pool(0.0, 2), decode_pool(0.0, 1)))
    assert planning.desired("prefill") == 5


def test_prompts_whose_rate_nobody_knows_change_nothing() -> None:
    planning = Planning()
    prefill = prefill_pool(0.0, 2, rate=None)
    planning.see(moment(0.0, router(0.0, tokens_per_s=9_000), prefill, decode_pool(0.0, 1)))
    assert planning.desired("prefill") == 2
    assert "no warm worker has reported its prefill rate yet" in planning.reason("prefill")


def test_a_rate_stays_known_while_no_worker_reports_it() -> None:
    planning = Planning()
    planning.see(moment(0.0, router(0.0), prefill_pool(0.0, 1), decode_pool(0.0, 1)))
    starting = prefill_pool(5.0, 1, num_live=0)
    planning.see(moment(5.0, router(5.0, tokens_per_s=9_000), starting, decode_pool(5.0, 1)))
    assert f"at {RATE:,.0f} tokens/s" in planning.reason("prefill")


def test_the_figures_of_a_moment_are_learned_from_once() -> None:
    planning = Planning()
    for now_s, itl_s in ((0.0, 0.02), (5.0, 0.04)):
        decode = decode_pool(now_s, 1, streams=20, fill=0.2, itl_s=itl_s)
        planning.see(moment(now_s, router(now_s), prefill_pool(now_s, 1), decode))
    learned = planning.state
    planning.see(moment(5.0, router(5.0), prefill_pool(5.0, 1), decode))
    assert planning.state == learned


# --- shrinking -----------------------------------------------------------------------------------


def test_nothing_shrinks_before_a_stable_window_is_known() -> None:
    planning = Planning()
    pools = prefill_pool(0.0, 1), decode_pool(0.0, 3)
    quiet(planning, pools, STABLE_S - 5.0)
    assert planning.desired("decode") == 3
    assert "known for 295 s of 300 s" in planning.reason("decode")
    quiet(planning, pools, STABLE_S)
    assert planning.desired("decode") == 2


def test_a_pool_shrinks_once_at_a_time_also_without_a_hold() -> None:
    planning = Planning(PlannerConfig(scale_in_hold_s=0.0))
    pools = prefill_pool(0.0, 1), decode_pool(0.0, 4)
    quiet(planning, pools, STABLE_S)
    assert planning.desired("decode") == 3
    applied = replace(decode_pool(STABLE_S, 4), desired_replicas=3)
    for now_s, desired in ((STABLE_S, 3), (STABLE_S + 1.0, 2)):
        planning.see(moment(now_s, router(now_s), prefill_pool(now_s, 1), applied))
        assert planning.desired("decode") == desired


def test_nothing_changes_while_workers_may_have_yet_to_register() -> None:
    """Those of a former supervisor: else they would count as never started, and leave all at
    once."""
    planning = Planning(PlannerConfig(scale_in_hold_s=0.0))
    quiet(planning, (prefill_pool(0.0, 6), decode_pool(0.0, 1)), STABLE_S - 5.0)
    pools = prefill_pool(STABLE_S, 6, num_live=0), decode_pool(STABLE_S, 1, num_live=0)
    split = RolePlan(prefill=1, decode=1)
    mixed = replace(pools[1], name="mixed", role=Role.MIXED, role_plan=split)
    seen = moment(STABLE_S, router(STABLE_S), *pools, mixed)
    plan = planning.see(replace(seen, settles=True))
    assert (plan["prefill"].desired_replicas, plan["decode"].desired_replicas) == (6, 1)
    assert plan["mixed"].role_plan == split
    assert "yet to register" in planning.reason("prefill")
    now_s = STABLE_S + 5.0
    planning.see(moment(now_s, router(now_s), prefill_pool(now_s, 6), decode_pool(now_s, 1)))
    assert planning.desired("prefill") == 5


@pytest.mark.parametrize("panic_window_s", [0.2, 1.0])
def test_of_a_short_panic_window_what_holds_up_a_caller_for_a_moment_is_no_gap(
    panic_window_s: float,
) -> None:
    """It was refused something, looks again within 5 s, and fleets are sent once a second."""
    config = PlannerConfig(panic_window_s=panic_window_s, stable_window_s=10.0, warm_up_s=0.0)
    planning, now_s = Planning(config), 0.0
    while now_s < 12.0:
        now_s += 5.9
        seen = prefill_pool(now_s, 1), decode_pool(now_s, 3)
        planning.see(moment(now_s, router(now_s), *seen))
    assert planning.desired("decode") == 2


def test_a_gap_in_what_is_known_begins_the_stable_window_anew() -> None:
    planning = Planning()
    pools = prefill_pool(0.0, 1), decode_pool(0.0, 3)
    quiet(planning, pools, 250.0)
    later_s = 290.0
    planning.see(
        moment(later_s, router(later_s), prefill_pool(later_s, 1), decode_pool(later_s, 3))
    )
    assert "known for 0 s of 300 s" in planning.reason("decode")


def test_the_most_that_was_needed_within_the_stable_window_is_kept() -> None:
    planning = Planning()
    busy = decode_pool(0.0, 3, streams=60, fill=2.2)
    planning.see(moment(0.0, router(0.0), prefill_pool(0.0, 1), busy))
    now_s = 5.0
    while now_s <= STABLE_S:
        planning.see(moment(now_s, router(now_s), prefill_pool(now_s, 1), decode_pool(now_s, 3)))
        assert planning.desired("decode") == 3, now_s
        now_s += 5.0
    while planning.desired("decode") == 3:
        planning.see(moment(now_s, router(now_s), prefill_pool(now_s, 1), decode_pool(now_s, 3)))
        now_s += 5.0
    assert now_s - STABLE_S <= planning.config.panic_window_s + 10.0
    assert "workers needed at most within 300 s" in planning.reason("decode")


def test_the_remaining_workers_hold_the_load_with_margin_or_none_leaves() -> None:
    """1.52 workers' worth of KV is 1.9 workers at 80% each; 2 would be nearly full."""
    for fill, replicas in ((1.52, 3), (1.3, 2)):
        planning = Planning()
        decode = decode_pool(0.0, 3, streams=60, fill=fill)
        quiet(planning, (prefill_pool(0.0, 1), decode), STABLE_S)
        assert planning.desired("decode") == replicas


def test_a_worker_that_is_not_heard_of_counts_as_busy() -> None:
    planning = Planning()
    now_s = 0.0
    while now_s <= STABLE_S:
        pool = decode_pool(now_s, 2)
        silent = replace(pool.workers[1], measured_at_s=-1_000.0)
        pool = replace(pool, workers=(pool.workers[0], silent))
        planning.see(moment(now_s, router(now_s), prefill_pool(now_s, 1), pool))
        now_s += 5.0
    assert planning.desired("decode") == 2
    assert "1 of 2 workers not heard of" in planning.reason("decode")


def test_an_unheard_router_may_be_as_busy_as_the_heard_ones() -> None:
    """1.2 workers' worth of prompts at the one that is heard."""
    planning = Planning()
    now_s = 0.0
    while now_s <= STABLE_S:
        heard = router(now_s, tokens_per_s=1_200)
        silent = replace(heard, router_id="router-1", measured_at_s=-1_000.0)
        pools = prefill_pool(now_s, 3), decode_pool(now_s, 1)
        planning.see(Signals(now_s, pools, (heard, silent)))
        now_s += 5.0
    assert planning.desired("prefill") == 3


# --- the ratio -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "sizes", "planned"),
    [
        (None, 1.0, (4, 2), (4, 4)),
        (0.5, None, (1, 4), (2, 4)),
        (0.5, 0.5, (2, 3), (2, 4)),
        (None, 0.25, (8, 16), (4, 16)),
        (2.0, None, (10, 10), (16, 8)),
    ],
    ids=["more decode", "more prefill", "exact", "decode at its most", "prefill at its most"],
)
def test_the_ratio_is_kept_by_the_fewest_more_replicas_or_at_the_most_by_fewer(
    low: float | None, high: float | None, sizes: tuple[int, int], planned: tuple[int, int]
) -> None:
    config = PlannerConfig(min_prefill_per_decode=low, max_prefill_per_decode=high)
    planning = Planning(config)
    planning.see(moment(0.0, router(0.0), prefill_pool(0.0, sizes[0]), decode_pool(0.0, sizes[1])))
    assert (planning.desired("prefill"), planning.desired("decode")) == planned
    assert "prefill for each decode replica" in (
        planning.reason("prefill") + planning.reason("decode")
    )


def test_an_exact_ratio_lets_pools_shrink_both_at_once() -> None:
    planning = Planning(PlannerConfig(min_prefill_per_decode=0.5, max_prefill_per_decode=0.5))
    quiet(planning, (prefill_pool(0.0, 2), decode_pool(0.0, 4)), STABLE_S)
    assert (planning.desired("prefill"), planning.desired("decode")) == (1, 2)


# --- several of a kind ----------------------------------------------------------------------------


def test_several_pools_of_a_role_share_its_load_by_what_they_can_do() -> None:
    """A pool with twice the rate and half the replicas has as much to do as the other."""
    planning = Planning()
    fast = replace(prefill_pool(0.0, 1, rate=2 * RATE), name="fast")
    slow = replace(prefill_pool(0.0, 2), name="slow")
    seen = router(0.0, tokens_per_s=6_400, for_prefill=QueueSignals())
    planning.see(moment(0.0, seen, fast, slow, decode_pool(0.0, 1)))
    assert (planning.desired("fast"), planning.desired("slow")) == (2, 4)


def test_what_a_pool_at_its_maximum_cannot_do_goes_to_the_others_of_its_role() -> None:
    planning = Planning()
    sizes = {"few": 4, "many": 1}
    for now_s in (0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0):
        few = replace(prefill_pool(now_s, sizes["few"]), name="few", max_replicas=4)
        many = replace(prefill_pool(now_s, sizes["many"]), name="many")
        seen = router(now_s, tokens_per_s=8_000)
        planning.see(moment(now_s, seen, few, many, decode_pool(now_s, 1)))
        sizes = {name: planning.desired(name) for name in sizes}
    assert sizes["few"] == 4
    assert 9 <= sum(sizes.values()) <= 11, "10 workers at 80% each, within tolerance"


def test_what_arrives_at_several_routers_is_added_up() -> None:
    planning = Planning()
    one = router(0.0, tokens_per_s=1_600)
    pools = prefill_pool(0.0, 2), decode_pool(0.0, 1)
    planning.see(Signals(0.0, pools, (one, replace(one, router_id="router-1"))))
    assert planning.desired("prefill") == 4
