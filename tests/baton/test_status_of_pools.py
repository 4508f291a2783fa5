"""How `baton status` shows pools, their model and replicas that start."""

from __future__ import annotations

import pytest

from baton.v1 import common_pb2, control_pb2
from cli.status import Fleet, UnitFleet, print_status

Capture = pytest.CaptureFixture[str]


def pool(name: str, **places: str) -> control_pb2.PoolStatus:
    """`places`: pods by worker ids."""
    return control_pb2.PoolStatus(
        name=name,
        role=common_pb2.WORKER_ROLE_DECODE,
        desired_replicas=2,
        live_replicas=1,
        places=[
            control_pb2.PoolPlace(worker_id=name, pod_name=pod) for name, pod in places.items()
        ],
    )


def shown(
    capsys: Capture,
    *pools: control_pb2.PoolStatus,
    registered: str = "",
    fingerprint: bytes = b"",
) -> list[list[str]]:
    """The words of each line."""
    ref = common_pb2.WorkerRef(worker_id=registered)
    workers = [control_pb2.FleetWorker(info=control_pb2.WorkerInfo(ref=ref))] if registered else []
    fleet = Fleet(pools=pools, workers=workers, model_fingerprint=fingerprint)
    print_status([UnitFleet("", 1.0, fleet)])
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_each_pool_is_shown_with_its_role_and_size(capsys: Capture) -> None:
    lines = shown(capsys, pool("prefill"), pool("decode"))
    assert ["pool", "role", "live"] in lines
    assert ["decode", "decode", "1", "of", "2"] in lines


@pytest.mark.parametrize(("fingerprint", "lines"), [(b"", []), (b"\x1f\xa0", ["1fa0"])])
def test_the_model_that_serves_is_shown_once_a_worker_has_registered(
    capsys: Capture, fingerprint: bytes, lines: list[str]
) -> None:
    found = shown(capsys, pool("decode"), fingerprint=fingerprint)
    assert [words[-1] for words in found if "fingerprint" in words] == lines


def test_a_replica_that_starts_is_shown_with_its_pod_until_its_worker_registers(
    capsys: Capture,
) -> None:
    placed = pool("decode", one="pod-a", two="pod-b", three="")
    starting = [line for line in shown(capsys, placed, registered="one") if "starts" in line]
    assert starting == [["two", "starts", "on", "pod", "pod-b"]]
