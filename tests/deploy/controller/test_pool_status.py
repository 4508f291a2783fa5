"""What a WorkerPool's status says of workers that drain, and of what clients see."""

from __future__ import annotations

import pytest

from baton.config.planner import PlannerConfig
from baton.fleet import Role, WorkerState
from baton.v1 import control_pb2
from deploy.api.status import MESSAGE, WorkerPoolStatus
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.manifests.common import Object
from deploy.controller.observed.fleet import (
    NOTHING_HEARD,
    Fleet,
    FleetPool,
    Heard,
    Slot,
    fleet_of,
)
from deploy.controller.observed.pod import Pod
from deploy.controller.observed.view import PoolView
from deploy.controller.status.pool_status import gpu_problem, pool_status, pool_verdicts
from tests.deploy.controller.clusters import pools_of, spec_of

SPEC = WorkerPoolSpec(role=Role.DECODE, cluster="main", pool="decode", drain_timeout="2m")
NAME = "decode"
BEGUN = "2026-01-01T10:00:00Z"


def draining(
    said: list[Object],
    now: str,
    num_running: int | None = 3,
    state: WorkerState = WorkerState.DRAINING,
) -> list[Object]:
    """What it says after `said`; `num_running` None: the supervisor is silent."""
    worker, slot = f"{NAME}-1", None
    if num_running is not None:
        slot = Slot(worker, "pod-b", state, num_running=num_running)
    fleet = None if slot is None else FleetPool(1, (slot,))
    obj = {"metadata": {}, "status": {"draining": said}}
    view = PoolView(obj, SPEC, [], fleet)
    found: list[Object] = pool_status(view, PlannerConfig(), now)["draining"]
    return found


def test_a_drain_keeps_the_time_at_which_it_was_seen_first() -> None:
    first = draining([], BEGUN)
    assert first == [
        {"worker": f"{NAME}-1", "pod": "pod-b", "numRunning": 3, "since": BEGUN},
    ]
    assert draining(first, "2026-01-01T10:01:00Z", 2) == [first[0] | {"numRunning": 2}]


def test_a_drain_that_takes_longer_than_it_may_says_what_holds_it() -> None:
    (late,) = draining(draining([], BEGUN), "2026-01-01T10:02:31Z")
    assert late["heldBy"] == "3 requests still run"
    (idle,) = draining([late], "2026-01-01T10:02:32Z", 0)
    assert idle["heldBy"] == "nothing runs on it any more, but its processes do not end"


def test_a_worker_that_hangs_while_it_drains_is_reported_as_one_that_drains() -> None:
    assert draining([], BEGUN, state=WorkerState.SUSPECT) == []
    first = draining([], BEGUN)
    (hangs,) = draining(first, "2026-01-01T10:02:31Z", 2, WorkerState.SUSPECT)
    assert hangs["since"] == BEGUN
    assert hangs["heldBy"] == "it is stuck or silent, 2 requests on it"


def test_a_silent_supervisor_ends_no_drain() -> None:
    first = draining([], BEGUN)
    assert draining(first, "2026-01-01T10:09:00Z", None) == first


def test_an_error_that_is_too_long_for_a_status_is_reported_as_far_as_it_goes() -> None:
    fleet = FleetPool(1, (), last_error="no memory: " + "x" * MESSAGE)
    view = PoolView({"metadata": {}}, SPEC, [], fleet)
    error = pool_status(view, PlannerConfig(), BEGUN)["lastError"]
    assert WorkerPoolStatus(last_error=error).last_error.startswith("no memory: xxx")


def test_what_clients_see_stands_beside_what_they_are_to_see() -> None:
    """At the router where they see worst."""
    said = control_pb2.WatchFleetResponse(
        pools=[control_pb2.PoolStatus(name=NAME, desired_replicas=1)],
        routers=[
            control_pb2.ReportRouterRequest(
                pools=[control_pb2.PoolFigures(pool=NAME, ttft_p95_s=0.25, itl_p95_s=0.04)]
            ),
            control_pb2.ReportRouterRequest(
                pools=[control_pb2.PoolFigures(pool=NAME, itl_p95_s=0.03)]
            ),
        ],
    )
    fleet = fleet_of(said)
    heard = Heard(fleet)
    view = PoolView({"metadata": {}}, SPEC, [], fleet.pools[NAME], None, heard)
    status = pool_status(view, PlannerConfig(itl_target_s=0.035), BEGUN)
    assert (status["itlSeconds"], status["itlTargetSeconds"]) == (0.04, 0.035)
    assert (status["ttftSeconds"], status["ttftTargetSeconds"]) == (0.25, None)
    silent = PoolView({"metadata": {}}, SPEC, [], None)
    assert pool_status(silent, PlannerConfig(), BEGUN)["itlSeconds"] is None


def test_a_pool_that_a_supervisor_does_not_know_yet_starts_and_says_what_was_refused() -> None:
    """Other pools' supervisor answers, and nothing else reports this one's workers."""
    before = {"draining": [{"worker": "w", "since": BEGUN}]}
    pod = Pod("a", "decode", True, False, BEGUN)

    def seen(heard: Heard) -> PoolView:
        fleet = None if heard.fleet is None else heard.fleet.pools.get(NAME)
        return PoolView({"metadata": {}, "status": before}, SPEC, [pod], fleet, None, heard)

    others = Fleet({"prefill": FleetPool(0, ())})
    other = seen(Heard(others))
    said = pool_verdicts(other, "blockSize: must divide", "pod a waits")
    assert [(each.is_true, each.reason, each.message) for each in said] == [
        (False, "TooFewLive", "0 of 1 workers live; pod a waits"),
        (True, "Starting", "0 of 1 workers live; pod a waits"),
        (True, "SupervisorRefused", "Ray's head: blockSize: must divide"),
    ]
    assert pool_verdicts(other, "")[-1].reason == "Sound"
    status = pool_status(other, PlannerConfig(), BEGUN)
    assert (status["readyReplicas"], status["draining"]) == (0, [])
    settles = (control_pb2.WatchFleetResponse(settles=True), 0.0)
    found, waits, heard = (
        Fleet({NAME: FleetPool(1, [Slot("w-0", "a", state)])})
        for state in (WorkerState.STARTING, None, WorkerState.LIVE)
    )
    assert pool_verdicts(seen(Heard(heard, settles)), "")[1].reason == "AsWanted"
    for fleet in (others, found, waits):  # it has yet to find what another left
        begins = Heard(fleet, settles)
        said = pool_verdicts(seen(begins), "")
        assert [each.reason for each in said] == ["Live", "Starting", "Sound"]
        status = pool_status(seen(begins), PlannerConfig(), BEGUN)
        assert status["readyReplicas"] == 1
        assert status["draining"] == before["draining"]
    said = pool_verdicts(seen(NOTHING_HEARD), "")
    assert [each.reason for each in said] == ["Live", "SupervisorSilent", "SupervisorSilent"]


def test_a_pool_whose_unit_drains_says_that_it_makes_way() -> None:
    fleet = FleetPool(0, (Slot("decode-0", "a", WorkerState.DRAINING),))
    pods = [Pod("a", "decode", True, False, BEGUN)]
    heard = Heard(Fleet({}))
    for there, reason in ((fleet, "Draining"), (FleetPool(0, ()), "MakesWay")):
        view = PoolView(
            {"metadata": {}}, SPEC, pods, there, None, heard, planned_size=0, makes_way=True
        )
        assert view.size == 0
        progressing = pool_verdicts(view, "")[1]
        assert (progressing.is_true, progressing.reason) == (True, reason)


GPUS: dict[str, object] = {
    "nodeSelector": {"nvidia.com/gpu.product": "L40S"},
    "tolerations": [{"key": "nvidia.com/gpu"}],
    "resources": {"limits": {"nvidia.com/gpu": 1}},
}


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_gpus_that_no_engine_uses_are_told_by_their_field(name: str, device: str) -> None:
    pools = {"decode": {"role": "decode", name: GPUS[name]}}
    spec = spec_of(pools=pools, engine={"device": device})
    said = gpu_problem(spec, pools_of(spec)["decode"])
    assert said.startswith(f"spec.pools.decode.{name}") == (device == "cpu")
