"""What a WorkerPool's status says of workers that drain, and of what clients see."""

from __future__ import annotations

from baton.v1 import control_pb2
from cluster.planner.config import PlannerConfig
from deploy.api.status import MESSAGE, WorkerPoolStatus
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.fleet_watch import fleet_of
from deploy.controller.manifests.common import POOL_LABEL, Object
from deploy.controller.observed import (
    NOTHING_HEARD,
    Fleet,
    FleetPool,
    Heard,
    Place,
    PlaceState,
    Pod,
)
from deploy.controller.pool_status import pool_status, pool_verdicts
from deploy.controller.revisions import Revision
from deploy.controller.rolling import PoolRolling
from deploy.controller.rollout import ReadyWatch
from deploy.controller.view import PoolView, RevisionView, pool_view

SPEC = WorkerPoolSpec(role="decode", cluster="main", pool="decode", drain_timeout="2m")
NAME = "decode-bcdfg"
BEGUN = "2026-01-01T10:00:00Z"
COHORT = {"baton.dev/cohort": "bcdfg"}
ROLLING = PoolRolling({}, frozenset(), ReadyWatch(NAME))


def draining(
    told: list[Object],
    now: str,
    num_running: int | None = 3,
    state: PlaceState = PlaceState.DRAINING,
) -> list[Object]:
    """What it says after `told`; `num_running` None: the supervisor is silent."""
    worker, place = f"{NAME}-1", None
    if num_running is not None:
        place = Place(worker, "pod-b", state, num_running=num_running)
    fleet = None if place is None else FleetPool(1, (place,))
    revision = RevisionView(Revision(NAME, "decode", ""), fleet=fleet)
    obj = {"metadata": {}, "status": {"draining": told}}
    view = PoolView(obj, SPEC, [], fleet, {NAME: revision}, NAME)
    found: list[Object] = pool_status(view, ROLLING, PlannerConfig(), now)["draining"]
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


def test_a_worker_that_hangs_while_it_drains_is_told_as_one_that_drains() -> None:
    assert draining([], BEGUN, state=PlaceState.SUSPECT) == []
    first = draining([], BEGUN)
    (hangs,) = draining(first, "2026-01-01T10:02:31Z", 2, PlaceState.SUSPECT)
    assert hangs["since"] == BEGUN
    assert hangs["heldBy"] == "it is stuck or silent, 2 requests on it"


def test_a_silent_supervisor_ends_no_drain() -> None:
    first = draining([], BEGUN)
    assert draining(first, "2026-01-01T10:09:00Z", None) == first


def test_an_error_that_is_too_long_for_a_status_is_told_as_far_as_it_goes() -> None:
    fleet = FleetPool(1, (), last_error="no memory: " + "x" * MESSAGE)
    revision = RevisionView(Revision(NAME, "decode", ""), fleet=fleet)
    view = PoolView({"metadata": {}}, SPEC, [], fleet, {NAME: revision}, NAME)
    error = pool_status(view, ROLLING, PlannerConfig(), BEGUN)["lastError"]
    assert WorkerPoolStatus(last_error=error).last_error.startswith("no memory: xxx")


def test_what_clients_see_stands_beside_what_they_are_to_see() -> None:
    """Two routers, and two revisions while a pool is rolled: none is to see worse."""
    older = f"{SPEC.pool}-xyzbc"
    told = control_pb2.WatchFleetResponse(
        pools=[control_pb2.PoolStatus(name=name, desired_replicas=1) for name in (NAME, older)],
        routers=[
            control_pb2.ReportRouterRequest(
                pools=[
                    control_pb2.PoolFigures(pool=NAME, itl_p95_s=0.02),
                    control_pb2.PoolFigures(pool=older, ttft_p95_s=0.25, itl_p95_s=0.04),
                ]
            ),
            control_pb2.ReportRouterRequest(
                pools=[control_pb2.PoolFigures(pool=NAME, itl_p95_s=0.03)]
            ),
        ],
    )
    fleet = fleet_of(told)
    obj = {"metadata": {"name": "main"}, "spec": {"pools": {"decode": {"role": "decode"}}}}
    groups = {
        name: {
            "groupName": name,
            "replicas": 1,
            "template": {"metadata": {"labels": {POOL_LABEL: "decode"}, "annotations": COHORT}},
        }
        for name in (NAME, older)
    }
    view = pool_view(obj, {"metadata": {}}, SPEC, groups, [], Heard(fleet, is_settled=True))
    status = pool_status(view, ROLLING, PlannerConfig(itl_target_s=0.035), BEGUN)
    assert (status["itlSeconds"], status["itlTargetSeconds"]) == (0.04, 0.035)
    assert (status["ttftSeconds"], status["ttftTargetSeconds"]) == (0.25, None)
    silent = pool_view(obj, {"metadata": {}}, SPEC, groups, [], NOTHING_HEARD)
    assert pool_status(silent, ROLLING, PlannerConfig(), BEGUN)["itlSeconds"] is None


def test_a_pool_that_a_supervisor_does_not_know_yet_starts_and_is_told_what_was_refused() -> None:
    """Other pools' supervisor answers, and nothing else tells of this one's workers."""
    obj = {"metadata": {"name": "main"}, "spec": {"pools": {"decode": {"role": "decode"}}}}
    before = {"updatedReplicas": 1, "draining": [{"worker": "w", "since": BEGUN}]}
    pod = Pod("a", "decode", True, False, NAME, BEGUN)

    def seen(heard: Heard) -> PoolView:
        return pool_view(obj, {"metadata": {}, "status": before}, SPEC, {}, [pod], heard)

    others = Fleet({"prefill-bcdfg": FleetPool(0, ())})
    other = seen(Heard(others, is_settled=True))
    told = pool_verdicts(other, ROLLING, "blockSize: must divide", "pod a waits")
    assert [(each.is_true, each.reason, each.message) for each in told] == [
        (False, "TooFewLive", "0 of 1 workers live; pod a waits"),
        (True, "Starting", "0 of 1 workers live; pod a waits"),
        (True, "SupervisorRefused", "the supervisor: blockSize: must divide"),
    ]
    assert pool_verdicts(other, ROLLING, "")[-1].reason == "Sound"
    status = pool_status(other, ROLLING, PlannerConfig(), BEGUN)
    assert (status["readyReplicas"], status["updatedReplicas"], status["draining"]) == (0, 0, [])
    settles = (control_pb2.WatchFleetResponse(settles=True), 0.0)
    found, waits, heard = (
        Fleet({other.target: FleetPool(1, [Place("w-0", "a", state)])})
        for state in (PlaceState.STARTING, PlaceState.PENDING, PlaceState.LIVE)
    )
    assert pool_verdicts(seen(Heard(heard, settles)), ROLLING, "")[1].reason == "AsWanted"
    for begins in (
        Heard(others),
        Heard(found, settles),
        Heard(waits, settles),
    ):  # it has yet to find what another left
        told = pool_verdicts(seen(begins), ROLLING, "")
        assert [each.reason for each in told] == ["Live", "SupervisorStarts", "Sound"]
        status = pool_status(seen(begins), ROLLING, PlannerConfig(), BEGUN)
        assert (status["readyReplicas"], status["updatedReplicas"]) == (1, 1)
        assert status["draining"] == before["draining"]
    told = pool_verdicts(seen(NOTHING_HEARD), ROLLING, "")
    assert [each.reason for each in told] == ["Live", "SupervisorSilent", "SupervisorSilent"]
