"""The planner's word for the pools of a ServingCluster."""

from __future__ import annotations

from baton.v1 import common_pb2, control_pb2
from cluster.planner.config import PlannerConfig
from cluster.planner.planner import PoolPlan
from deploy.api.worker_pool import Scaling, ScalingMode, WorkerPoolSpec
from deploy.controller.objects import Key
from deploy.controller.planning import Planning, by_pool

MAIN = Key("models", "main")
POOL_OF = {"prefill-old": "prefill", "prefill-new": "prefill"}
CONFIG = PlannerConfig(panic_window_s=10.0, stable_window_s=20.0, warm_up_s=0.0)


def told(replicas: int) -> control_pb2.WatchFleetResponse:
    """One live prefill worker that computes 1,000 tokens/s, and 2,400 that arrive."""
    answer = control_pb2.WatchFleetResponse(
        routers=[
            control_pb2.ReportRouterRequest(
                router_id="router-1", requests_per_s=4.0, uncached_tokens_per_s=2400.0
            )
        ],
        pools=[
            control_pb2.PoolStatus(
                name=name, role=common_pb2.WORKER_ROLE_PREFILL, desired_replicas=size
            )
            for name, size in (("prefill-old", replicas), ("prefill-new", 0))
        ],
    )
    worker = answer.workers.add(state=control_pb2.WORKER_STATE_LIVE)
    worker.info.ref.worker_id, worker.info.pool, worker.info.max_num_seqs = (
        "prefill-old-0",
        "prefill-old",
        8,
    )
    worker.load.num_blocks = worker.load.num_free_blocks = 100
    worker.load.prefill_tokens_per_s = 1000.0
    return answer


def planned(mode: ScalingMode) -> PoolPlan:
    planning = Planning()
    pool = WorkerPoolSpec(
        role="prefill", cluster="main", pool="prefill", max_replicas=8, scaling=Scaling(mode)
    )
    plans = {}
    for second in range(0, 12, 2):
        plans = planning.plan(MAIN, (told(1), float(second)), {"prefill": pool}, CONFIG, POOL_OF)
    return plans["prefill"]


def test_a_pool_of_the_planners_grows_with_what_arrives_and_says_why() -> None:
    plan = planned("planner")
    assert plan.desired_replicas > 1
    assert "tokens/s" in plan.reason


def test_a_pool_that_a_person_scales_stays_as_it_is() -> None:
    assert planned("manual").desired_replicas == 1
    assert planned("hpa").desired_replicas == 1


def test_the_revisions_of_a_pool_are_one_pool_to_the_planner() -> None:
    answer = told(3)
    answer.pools[1].desired_replicas = 1
    seen = by_pool(answer, POOL_OF)
    ((name, size),) = [(pool.name, pool.desired_replicas) for pool in seen.pools]
    assert (name, size) == ("prefill", 4)
    assert [worker.info.pool for worker in seen.workers] == ["prefill"]
    assert answer.pools[0].name == "prefill-old", "the answer itself stays as it was"
