"""The gaps that clients see are what the ITL target is kept for, not what workers alone tell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.planner.signals import (
    PoolGaps,
    PoolSignals,
    RouterSignals,
    Signals,
    WorkerPhase,
    WorkerSignals,
)
from tests.cluster.planner.moments import (
    STABLE_S,
    Planning,
    decode_pool,
    prefill_pool,
    router,
    with_workers,
    worker,
)

MANY = 2_000


def seen(now_s: float, p95_s: float, num_gaps: int = MANY) -> RouterSignals:
    return replace(router(now_s), gaps=(PoolGaps("decode", num_gaps, p95_s),))


def pool(now_s: float, desired: int = 2) -> PoolSignals:
    """Steps of 40 ms, 20 streams each."""
    return decode_pool(now_s, desired, streams=40, fill=0.4, itl_s=0.04)


def planned(*moments: Signals) -> Planning:
    planning = Planning()
    for each in moments:
        planning.see(each)
    return planning


def at(now_s: float, decode: PoolSignals, *routers: RouterSignals) -> Signals:
    return Signals(now_s, (prefill_pool(now_s, 1), decode), routers)


def test_gaps_over_the_target_ask_for_workers_though_decode_steps_are_within_it() -> None:
    """What is beside a step stays, whatever its streams: 10 ms of 50 ms leave it 40 ms, 25 ms
    leave 25 ms."""
    assert planned(at(0.0, pool(0.0), seen(0.0, 0.05))).desired("decode") == 2
    planning = planned(at(0.0, pool(0.0), seen(0.0, 0.065)))
    assert planning.desired("decode") == 3, "2 * 40 / 25, a tenth over is tolerated"
    assert "ITL 65.0 ms over target 50 ms, 25.0 ms of it beside" in planning.reason("decode")


def test_what_prompts_take_beside_the_streams_is_told_where_no_worker_mends_it() -> None:
    planning = planned(at(0.0, pool(0.0), seen(0.0, 0.327)))
    assert planning.desired("decode") == 2
    told = (
        "ITL 327.0 ms over target 50 ms, 287.0 ms of it beside decode steps: more workers cannot "
        "mend that, steps of 50 ms need 1.6 workers"
    )
    assert told in planning.reason("decode")


@pytest.mark.parametrize("extra_s", [0.0, 0.042, 0.06, 0.3])
def test_decode_steps_are_kept_within_the_target_though_clients_gaps_are_out_of_reach(
    extra_s: float,
) -> None:
    """Steps take 10 ms and 1 ms a stream, so that five workers keep 3,200 tokens/s within 50 ms.
    Fewer would make gaps longer, and more hardly shorter."""
    planning, desired = Planning(), 7
    for number in range(400):
        now_s, step_s = 5.0 * number, 0.01 / (1 - 3.2 / desired)
        streams = round(3_200 * step_s)
        decode = decode_pool(now_s, desired, streams=streams, fill=0.1, itl_s=step_s)
        planning.see(at(now_s, decode, seen(now_s, step_s + extra_s)))
        desired = planning.desired("decode")
    assert desired == 5


def test_gaps_of_several_routers_count_by_their_number() -> None:
    many, few = seen(0.0, 0.04, 3_000), seen(0.0, 0.08, 1_000)
    assert "ITL 50.0 ms" in planned(at(0.0, pool(0.0), many, few)).reason("decode")


@pytest.mark.parametrize("num_gaps", [0, 99])
def test_too_few_gaps_say_nothing(num_gaps: int) -> None:
    planning = planned(at(0.0, pool(0.0), seen(0.0, 0.327, num_gaps)))
    assert "ITL 40.0 ms" in planning.reason("decode")


def test_gaps_that_were_told_too_long_ago_say_nothing() -> None:
    old = replace(seen(0.0, 0.327), measured_at_s=-20.0)
    planning = planned(at(0.0, pool(0.0), old, router(0.0)))
    assert "ITL 40.0 ms" in planning.reason("decode")


@pytest.mark.parametrize(
    "other",
    [
        worker("new-0", 0.0, live_for_s=5.0, streams=20, itl_s=0.4),
        worker("old-0", 0.0, phase=WorkerPhase.DRAINING, streams=20, itl_s=0.4),
    ],
    ids=["cold", "draining"],
)
def test_gaps_that_may_be_of_a_cold_worker_or_one_that_drains_change_nothing(
    other: WorkerSignals,
) -> None:
    planning = planned(at(0.0, with_workers(pool(0.0), other), seen(0.0, 0.327)))
    assert "ITL 40.0 ms" in planning.reason("decode")
    other = replace(other, measured_at_s=10.0)
    known = at(5.0, pool(5.0), seen(5.0, 0.06))
    tainted = at(10.0, with_workers(pool(10.0), other), seen(10.0, 0.327))
    planning = planned(known, tainted)
    assert "ITL 60.0 ms" in planning.reason("decode"), "as last known"


def test_what_has_not_been_known_for_a_stable_window_is_gone_by_no_more() -> None:
    planning = planned(at(0.0, pool(0.0), seen(0.0, 0.06)))
    for number in range(1, 61):
        now_s = 5.0 * number
        planning.see(at(now_s, pool(now_s), seen(now_s, 0.06, 99)))
        assert "ITL 60.0 ms" in planning.reason("decode"), "as last known"
    planning.see(at(STABLE_S + 5.0, pool(STABLE_S + 5.0), seen(STABLE_S + 5.0, 0.06, 99)))
    assert "ITL 40.0 ms" in planning.reason("decode")
    planning.see(at(STABLE_S + 10.0, pool(STABLE_S + 10.0), seen(STABLE_S + 10.0, 0.045)))
    assert "ITL 45.0 ms" in planning.reason("decode"), "not smoothed by what was long ago"


def test_a_moment_of_longer_gaps_hardly_changes_what_is_known() -> None:
    planning = Planning()
    for now_s in (0.0, 5.0, 10.0):
        planning.see(at(now_s, pool(now_s), seen(now_s, 0.327 if now_s == 5.0 else 0.04)))
    assert planning.desired("decode") <= 3
    for number in range(3, 60):
        now_s = 5.0 * number
        planning.see(at(now_s, pool(now_s), seen(now_s, 0.04)))
    assert "needs 1.6 workers" in planning.reason("decode")
