"""When pools stop together, and when they start again."""

from __future__ import annotations

from dataclasses import replace

from baton.config.planner import PlannerConfig
from cluster.planner.signals import RouterSignals
from tests.cluster.planner.moments import (
    STABLE_S,
    Planning,
    decode_pool,
    moment,
    prefill_pool,
    quiet,
    router,
)

ZERO = PlannerConfig(scale_to_zero_after_s=STABLE_S)


def test_idle_pools_stop_together_and_start_together_for_a_held_request() -> None:
    planning = Planning(ZERO)
    quiet(planning, (prefill_pool(0.0, 2), decode_pool(0.0, 3)), STABLE_S - 5.0)
    assert min(planning.desired("prefill"), planning.desired("decode")) > 0
    quiet(planning, (prefill_pool(0.0, 2), decode_pool(0.0, 3)), STABLE_S)
    assert (planning.desired("prefill"), planning.desired("decode")) == (0, 0)
    assert "all pools stop together" in planning.reason("decode")

    stopped = prefill_pool(400.0, 0), decode_pool(400.0, 0)
    planning.see(moment(400.0, router(400.0), *stopped))
    assert (planning.desired("prefill"), planning.desired("decode")) == (0, 0)
    planning.see(moment(405.0, router(405.0, held=1), *stopped))
    assert (planning.desired("prefill"), planning.desired("decode")) == (1, 1)
    assert "all pools start together, requests held: 1" in planning.reason("decode")


def test_a_router_that_falls_silent_keeps_pools_from_stopping_and_starts_none() -> None:
    """It may serve on, and so keeps up what runs; where nothing runs it serves nobody."""
    planning = Planning(ZERO)
    silent = RouterSignals("router-1", None)
    stopped = moment(0.0, router(0.0), prefill_pool(0.0, 0), decode_pool(0.0, 0))
    planning.see(replace(stopped, routers=(*stopped.routers, silent)))
    assert (planning.desired("prefill"), planning.desired("decode")) == (0, 0)
    assert "no request is held" in planning.reason("decode")
    held = moment(5.0, router(5.0, held=1), prefill_pool(5.0, 0), decode_pool(5.0, 0))
    planning.see(replace(held, routers=(*held.routers, silent)))
    assert (planning.desired("prefill"), planning.desired("decode")) == (1, 1)

    now_s = 10.0
    while now_s <= 10.0 + 2 * STABLE_S:
        idle = moment(now_s, router(now_s), prefill_pool(now_s, 1), decode_pool(now_s, 1))
        planning.see(replace(idle, routers=(*idle.routers, silent)))
        now_s += 5.0
    assert (planning.desired("prefill"), planning.desired("decode")) == (1, 1)


def test_pools_do_not_stop_while_a_stream_runs() -> None:
    planning = Planning(ZERO)
    quiet(planning, (prefill_pool(0.0, 1), decode_pool(0.0, 1, streams=1)), 3 * STABLE_S)
    assert (planning.desired("prefill"), planning.desired("decode")) == (1, 1)


def test_pools_do_not_stop_before_their_first_workers_are_live_unless_these_do_not_start() -> None:
    planning = Planning(ZERO)
    loading = replace(prefill_pool(0.0, 1, num_live=0), num_pending=1)
    quiet(planning, (loading, decode_pool(0.0, 1)), 3 * STABLE_S)
    assert (planning.desired("prefill"), planning.desired("decode")) == (1, 1)
    failing = replace(loading, num_failed_starts=2)
    quiet(planning, (failing, decode_pool(0.0, 1)), 5 * STABLE_S, from_s=3 * STABLE_S)
    assert (planning.desired("prefill"), planning.desired("decode")) == (0, 0)


def test_a_pool_that_finds_no_machine_for_long_keeps_no_other_from_stopping() -> None:
    planning = Planning(ZERO)
    pending = replace(prefill_pool(0.0, 1, num_live=0), num_pending=1)
    quiet(planning, (pending, decode_pool(0.0, 1)), 1800.0 + STABLE_S + 10.0)
    assert (planning.desired("prefill"), planning.desired("decode")) == (0, 0)


def test_a_registry_that_has_just_started_does_not_make_pools_idle() -> None:
    planning = Planning(ZERO)
    pools = prefill_pool(0.0, 1), decode_pool(0.0, 1)
    quiet(planning, pools, STABLE_S - 10.0)
    now_s = STABLE_S - 5.0
    idle = moment(now_s, router(now_s), prefill_pool(now_s, 1), decode_pool(now_s, 1))
    planning.see(replace(idle, settles=True))
    quiet(planning, pools, STABLE_S, from_s=STABLE_S)
    assert (planning.desired("prefill"), planning.desired("decode")) == (1, 1)


def test_pools_do_not_stop_unless_all_of_them_may() -> None:
    planning = Planning(ZERO)
    decode = replace(decode_pool(0.0, 1), min_replicas=1)
    quiet(planning, (prefill_pool(0.0, 1), decode), 3 * STABLE_S)
    assert (planning.desired("prefill"), planning.desired("decode")) == (1, 1)


def test_pools_do_not_stop_while_no_router_is_heard() -> None:
    planning = Planning(ZERO)
    now_s = 0.0
    while now_s <= 3 * STABLE_S:
        planning.see(moment(now_s, router(-100.0), prefill_pool(now_s, 1), decode_pool(now_s, 1)))
        now_s += 5.0
    assert (planning.desired("prefill"), planning.desired("decode")) == (1, 1)


def test_a_pool_that_somebody_stopped_alone_starts_again() -> None:
    planning = Planning(ZERO)
    planning.see(moment(0.0, router(0.0), prefill_pool(0.0, 2), decode_pool(0.0, 0)))
    assert planning.desired("decode") == 1


def test_a_pool_that_somebody_else_sizes_is_gone_by_and_never_stopped() -> None:
    planning = Planning(ZERO)
    by_hand = replace(decode_pool(0.0, 3), min_replicas=3, max_replicas=3)
    quiet(planning, (prefill_pool(0.0, 1), by_hand), 3 * STABLE_S)
    assert (planning.desired("prefill"), planning.desired("decode")) == (1, 3)
