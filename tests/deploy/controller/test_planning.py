"""The planner's word for the pools of a ServingCluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from baton.config.planner import PlannerConfig
from baton.fleet import Role
from baton.v1 import common_pb2, control_pb2
from cluster.planner.planner import PoolPlan
from cluster.role_plan import RolePlan as Split
from deploy.api.worker_pool import RolePlan, Scaling, ScalingMode, WorkerPoolSpec
from deploy.controller.kit.objects import Key
from deploy.controller.observed.view import PoolView
from deploy.controller.reconcile.planning import Planning
from tests.deploy.controller.views import view_of

MAIN = Key("models", "main")
CONFIG = PlannerConfig(panic_window_s=10.0, stable_window_s=20.0, warm_up_s=0.0, role_hold_s=10.0)
NUM_MIXED = 4


def answer_of(
    tokens_per_s: float,
    sizes: dict[str, int],
    workers: Iterable[str],
    role: common_pb2.WorkerRole = common_pb2.WORKER_ROLE_PREFILL,
    kv_use: float = 0.0,
) -> control_pb2.WatchFleetResponse:
    """`tokens_per_s` arrive; live `workers`, by their pools, compute 1,000 each, and `kv_use` of
    their KV is full. The supervisor knows nothing of roles that switch."""
    router = control_pb2.ReportRouterRequest(
        router_id="router-1", requests_per_s=4.0, uncached_tokens_per_s=tokens_per_s
    )
    pools = [
        control_pb2.PoolStatus(name=name, role=role, desired_replicas=size)
        for name, size in sizes.items()
    ]
    answer = control_pb2.WatchFleetResponse(routers=[router], pools=pools)
    for number, pool in enumerate(workers):
        worker = answer.workers.add(state=control_pb2.WORKER_STATE_LIVE)
        worker.info.ref.worker_id, worker.info.pool = f"{pool}-{number}", pool
        worker.info.max_num_seqs, worker.load.num_running = 64, 10
        worker.load.num_blocks, worker.load.num_free_blocks = 1000, round(1000 * (1 - kv_use))
        worker.load.prefill_tokens_per_s = 1000.0
    return answer


def planned(mode: ScalingMode, *, has: int = 1, supervisor_has: int = 1) -> PoolPlan:
    planning = Planning()
    pool = WorkerPoolSpec(
        role=Role.PREFILL,
        cluster="main",
        pool="prefill",
        max_replicas=8,
        replicas=has,
        scaling=Scaling(mode),
    )
    plans = {}
    for second in range(0, 12, 2):
        answer = answer_of(2400.0, {"prefill": supervisor_has}, ["prefill"])
        plans = planning.plan(MAIN, (answer, float(second)), {"prefill": pool}, CONFIG)
    return plans["prefill"]


def test_a_pool_of_the_planners_grows_with_what_arrives_and_says_why() -> None:
    plan = planned("planner")
    assert plan.desired_replicas > 1
    assert "tokens/s" in plan.reason


def test_a_pool_that_a_person_scales_stays_as_it_is() -> None:
    assert planned("manual").desired_replicas == 1
    assert planned("hpa").desired_replicas == 1


def test_dynamo_4420_the_size_that_counts_is_the_worker_pools_and_not_the_supervisors() -> None:
    """The planner compared its wish with another object's replicas, found it there already, and
    skipped, for ever."""
    wish = planned("planner").desired_replicas
    lags = planned("planner", has=1, supervisor_has=wish)
    assert lags.reason.startswith(f"prefill 1 -> {wish}: ")
    leads = planned("planner", has=wish + 2, supervisor_has=1)
    assert leads.reason.startswith(f"prefill stays at {wish + 2}: ")


def test_a_pool_that_is_being_deleted_has_no_part_in_the_load_of_what_replaces_it() -> None:
    """It still has four workers, which finish what they run."""
    spec = WorkerPoolSpec(
        role=Role.PREFILL, cluster="main", pool="new", max_replicas=8, scaling=Scaling("planner")
    )
    going = {"metadata": {"deletionTimestamp": "2026-11-23T05:00:00Z"}}
    pools = {
        "new": PoolView({"metadata": {}}, spec, [], None),
        "prefill": PoolView(going, replace(spec, pool="prefill", replicas=4), [], None),
    }
    view = replace(view_of(), pools=pools)
    answer = answer_of(2400.0, {"prefill": 4, "new": 1}, ["prefill", "new"])
    plans = Planning().plan(MAIN, (answer, 0.0), view.staying_specs, CONFIG)
    assert plans.keys() == {"new"}
    assert "2,400 uncached tokens/s" in plans["new"].reason


# --- a mixed pool ---------------------------------------------------------------------------------


def mixed_fleet(tokens_per_s: float, kv_fill: float) -> control_pb2.WatchFleetResponse:
    """`kv_fill`: how many of its workers' KV is full."""
    workers, role = ["mixed"] * NUM_MIXED, common_pb2.WORKER_ROLE_MIXED
    return answer_of(tokens_per_s, {"mixed": NUM_MIXED}, workers, role, kv_fill / NUM_MIXED)


def mixed_pool(roles: RolePlan | None) -> WorkerPoolSpec:
    return WorkerPoolSpec(
        role=Role.MIXED,
        cluster="main",
        pool="mixed",
        max_replicas=NUM_MIXED,
        replicas=NUM_MIXED,
        scaling=Scaling("planner"),
        role_plan=roles,
    )


def test_the_roles_of_a_mixed_pool_follow_the_load() -> None:
    planning, roles, second = Planning(), None, 0.0
    split = []
    for tokens_per_s, kv_fill in ((2450.0, 0.85), (820.0, 2.45), (2450.0, 0.85)):
        for _ in range(20):
            said = mixed_fleet(tokens_per_s, kv_fill), second
            pools = {"mixed": mixed_pool(roles)}
            plan = planning.plan(MAIN, said, pools, CONFIG)["mixed"]
            assert plan.desired_replicas == NUM_MIXED
            assert plan.role_plan is not None
            second += 2.0
            roles = RolePlan(plan.role_plan.prefill, plan.role_plan.decode)  # it is written
        split.append(plan.role_plan)
    assert split == [Split(3, 1), Split(1, 3), Split(3, 1)]
    assert "3 prefill alone, 1 decode alone" in plan.reason


def test_the_roles_in_force_are_those_of_the_worker_pool_whatever_the_supervisor_knows() -> None:
    """Either split does for this load, and so either stays."""
    for prefill in (1, 2):
        said, pools = (
            (mixed_fleet(1480.0, 1.0), 0.0),
            {"mixed": mixed_pool(RolePlan(prefill, 1))},
        )
        plans = Planning().plan(MAIN, said, pools, CONFIG)
        assert plans["mixed"].role_plan == Split(prefill, 1)
