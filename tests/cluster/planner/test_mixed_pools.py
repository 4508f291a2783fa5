"""Which role the workers of a mixed pool act in."""

from __future__ import annotations

import math

from baton.config.planner import PlannerConfig
from baton.fleet import Role
from cluster.planner.signals import PoolSignals
from cluster.role_plan import RolePlan
from tests.cluster.planner.moments import Planning, moment, router, worker

BOTH = RolePlan()


def mixed(
    now_s: float, desired: int, *, plan: RolePlan = BOTH, fill: float = 0.0, streams: int = 0
) -> PoolSignals:
    workers = tuple(
        worker(f"mixed-{i}", now_s, streams=streams // desired, kv_use=fill / desired)
        for i in range(desired)
    )
    return PoolSignals("mixed", Role.MIXED, desired, 16, workers=workers, role_plan=plan)


def roles(planning: Planning) -> RolePlan:
    plan = planning.plan["mixed"].role_plan
    assert plan is not None
    return plan


def test_a_small_load_of_both_roles_shares_one_worker() -> None:
    planning = Planning()
    seen = router(0.0, tokens_per_s=200)
    planning.see(moment(0.0, seen, mixed(0.0, 1, fill=0.2, streams=5)))
    assert planning.desired("mixed") == 1
    assert roles(planning) == RolePlan()


def test_roles_are_switched_once_for_each_turn_of_a_noisy_load() -> None:
    planning = Planning()
    plan, turned_s, switched_s = BOTH, [], []
    for number in range(720):
        now_s, noise = 5.0 * number, 1 + 0.05 * math.sin(2.4 * number)
        much_prefill = number // 240 != 1
        tokens_per_s, fill = (2_450, 0.85) if much_prefill else (820, 2.45)
        if number % 240 == 0:
            turned_s.append(now_s)
        pool = mixed(now_s, 4, plan=plan, fill=fill / noise, streams=40)
        planning.see(moment(now_s, router(now_s, tokens_per_s=noise * tokens_per_s), pool))
        assert planning.desired("mixed") == 4
        if roles(planning) != plan:
            plan = roles(planning)
            switched_s.append(now_s)
            whole = RolePlan(3, 1) if much_prefill else RolePlan(1, 3)
    assert plan == whole == RolePlan(3, 1)
    assert "3 prefill alone, 1 decode alone, 0 both" in planning.reason("mixed")
    assert len(switched_s) <= 2 * len(turned_s), "half way within the panic window, then wholly"
    for begin_s in turned_s:
        assert any(0 <= at_s - begin_s <= 20.0 for at_s in switched_s)


def test_roles_in_force_stay_while_the_need_is_within_tolerance_of_them() -> None:
    """1.75 or 1.95 workers' worth of prompts: 2 workers prefill alone, or 1."""
    for prefill_alone in (1, 2):
        for tokens_per_s in (1_400, 1_560):
            planning = Planning()
            plan = RolePlan(prefill_alone, 1)
            pool = mixed(0.0, 4, plan=plan, fill=1.0, streams=20)
            planning.see(moment(0.0, router(0.0, tokens_per_s=tokens_per_s), pool))
            assert roles(planning) == plan


def test_roles_are_not_switched_again_within_their_hold() -> None:
    planning = Planning()

    def see(now_s: float, in_force: RolePlan, tokens_per_s: float, fill: float) -> RolePlan:
        pool = mixed(now_s, 4, plan=in_force, fill=fill, streams=40)
        planning.see(moment(now_s, router(now_s, tokens_per_s=tokens_per_s), pool))
        return roles(planning)

    first = see(0.0, BOTH, 2_450, 0.85)
    assert first == RolePlan(3, 1)
    assert see(5.0, first, 2_450, 0.85) == first
    assert see(30.0, first, 820, 2.45) == first, "in force for 25 s"
    assert see(35.0, first, 820, 2.45) == RolePlan(1, 3)


def test_a_split_that_would_leave_a_role_to_nobody_is_not_held() -> None:
    """The pool goes from two workers to one, a moment after one of them was to prefill alone."""
    planning = Planning()
    planning.see(moment(0.0, router(0.0), mixed(0.0, 2)))
    planning.see(moment(5.0, router(5.0), mixed(5.0, 2, plan=RolePlan(prefill=1))))
    planning.see(moment(10.0, router(10.0), mixed(10.0, 1, plan=RolePlan(prefill=1))))
    assert roles(planning) == BOTH


def test_a_role_switch_leaves_the_workers_that_running_streams_need() -> None:
    """3 of 4 workers' KV is taken, and prompts would need 8 workers."""
    planning = Planning(PlannerConfig(max_step_out=1))
    pool = mixed(0.0, 4, fill=2.9, streams=40)
    planning.see(moment(0.0, router(0.0, tokens_per_s=6_400), pool))
    assert planning.desired("mixed") == 5
    assert 4 - roles(planning).prefill >= 3


def test_roles_of_a_blind_pool_stay() -> None:
    planning = Planning()
    plan = RolePlan(prefill=2, decode=1)
    planning.see(moment(0.0, router(-100.0), mixed(0.0, 4, plan=plan)))
    assert roles(planning) == plan
