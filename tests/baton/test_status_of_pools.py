"""How `baton status` shows pools of several cohorts, and replicas that start."""

from __future__ import annotations

import pytest

from baton.operate import print_fleet
from baton.v1 import common_pb2, control_pb2

Capture = pytest.CaptureFixture[str]


def pool(name: str, cohort: str, weight: int, **places: str) -> control_pb2.PoolStatus:
    """`places`: pods by worker ids."""
    return control_pb2.PoolStatus(
        name=name,
        role=common_pb2.WORKER_ROLE_DECODE,
        desired_replicas=2,
        live_replicas=1,
        cohort=cohort,
        cohort_weight=weight,
        places=[
            control_pb2.PoolPlace(worker_id=name, pod_name=pod) for name, pod in places.items()
        ],
    )


def shown(capsys: Capture, *pools: control_pb2.PoolStatus, registered: str = "") -> list[list[str]]:
    """The words of each line."""
    ref = common_pb2.WorkerRef(worker_id=registered)
    workers = [control_pb2.FleetWorker(info=control_pb2.WorkerInfo(ref=ref))] if registered else []
    print_fleet(control_pb2.WatchFleetResponse(pools=pools, workers=workers))
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_cluster_of_one_cohort_does_not_speak_of_cohorts(capsys: Capture) -> None:
    lines = shown(capsys, pool("prefill", "", 100), pool("decode", "", 100))
    assert ["pool", "role", "live"] in lines
    assert ["decode", "decode", "1", "of", "2"] in lines


def test_where_there_are_several_each_pool_has_its_cohort_and_that_ones_share(
    capsys: Capture,
) -> None:
    pools = pool("prefill", "", 30), pool("decode", "", 30), pool("decode-2", "7f3", 10)
    lines = shown(capsys, *pools)
    assert ["decode", "decode", "1", "of", "2", "first", "75%"] in lines
    assert ["decode-2", "decode", "1", "of", "2", "7f3", "25%"] in lines
    stopped = shown(capsys, pool("decode", "", 0), pool("decode-2", "7f3", 0))
    assert ["decode-2", "decode", "1", "of", "2", "7f3", "-"] in stopped


def test_a_replica_that_starts_is_shown_with_its_pod_until_its_worker_registers(
    capsys: Capture,
) -> None:
    placed = pool("decode", "", 1, one="pod-a", two="pod-b", three="")
    starting = [line for line in shown(capsys, placed, registered="one") if "starts" in line]
    assert starting == [["two", "starts", "on", "pod", "pod-b"]]
