"""`baton top` and `baton status`: what a fleet comes to, and how it is shown."""

from __future__ import annotations

import io
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from rich.console import Console

from baton.render import out, table
from baton.v1 import common_pb2, control_pb2, worker_pb2
from cli.main import main
from cli.status import Fleet, UnitFleet, status_screen, top_screen
from tests.baton.small_router import SmallControl
from tests.baton.terminal import CTRL_C, Terminal

Capture = pytest.CaptureFixture[str]
LIVE = control_pb2.WORKER_STATE_LIVE
PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE


def worker(
    name: str, state: control_pb2.WorkerState.ValueType = LIVE, **load: float
) -> control_pb2.FleetWorker:
    """Of the pool that its name begins with."""
    pool = name.rpartition("-")[0]
    info = control_pb2.WorkerInfo(ref=common_pb2.WorkerRef(worker_id=name), pool=pool)
    return control_pb2.FleetWorker(info=info, state=state, load=worker_pb2.WorkerLoad(**load))


def fleet(**changes: int) -> Fleet:
    """One prefill worker of 1,000 tok/s, two that decode, one that has gone; one router."""
    waiting = control_pb2.QueueFigures(num_requests=4, median_wait_s=0.25)
    router = control_pb2.ReportRouterRequest(
        requests_per_s=2.0,
        uncached_tokens_per_s=500.0,
        waiting_for_prefill=waiting,
        pools=[
            control_pb2.PoolFigures(pool="prefill", ttft_p95_s=0.48),
            control_pb2.PoolFigures(pool="decode", itl_p95_s=0.035),
        ],
        **changes,
    )
    return Fleet(
        pools=[
            control_pb2.PoolStatus(
                name="prefill", role=PREFILL, desired_replicas=1, live_replicas=1
            ),
            control_pb2.PoolStatus(
                name="decode", role=DECODE, desired_replicas=4, live_replicas=2, pending_replicas=2
            ),
        ],
        workers=[
            worker("prefill-0", prefill_tokens_per_s=1000, num_waiting=3, num_queued_tokens=900,
                   decode_step_s=0.02),
            worker("decode-0", num_running=2, decode_step_s=0.02, num_blocks=100,
                   num_free_blocks=75),
            worker("decode-1", num_running=6, decode_step_s=0.03, num_blocks=100,
                   num_free_blocks=30, num_quarantined_blocks=10),
            worker("decode-2", control_pb2.WORKER_STATE_GONE, num_running=9, decode_step_s=9,
                   num_blocks=100),
        ],
        routers=[router],
    )  # fmt: skip


def shown(what: Fleet) -> list[str]:
    with out().capture() as capture:
        out().print(top_screen([UnitFleet("", 1.0, what)]))
    return capture.get().splitlines()


def row_of(lines: list[str], name: str) -> dict[str, str]:
    """Cells by their columns' names; each column is flushed right at its name's end."""
    (line,) = [line for line in lines if line.startswith(f"{name} ")]
    header = next(each for each in reversed(lines[: lines.index(line)]) if "KV used" in each)
    cells = {}
    columns = "live", "pending", "TTFT", "ITL", "KV used", "running", "queued", "step", "output"
    for column in columns:
        end = header.find(f" {column} ") + 1 + len(column)
        if end > len(column):
            cells[column] = line[:end].rpartition("  ")[2].strip()
    return cells


def test_the_tables_align_and_show_what_waits() -> None:
    lines = shown(fleet())
    assert row_of(lines, "decode") == {
        "live": "2 of 4", "pending": "2", "TTFT": "-", "ITL": "35.0 ms", "KV used": "60%",
        "running": "8", "queued": "0 tok", "step": "30.0 ms", "output": "300 tok/s",
    }  # fmt: skip
    prefill = row_of(lines, "prefill")
    assert (prefill["TTFT"], prefill["queued"], prefill["pending"]) == ("480 ms", "900 tok", "-")
    assert (prefill["step"], prefill["output"]) == ("-", "-"), "it decodes nothing"
    assert row_of(lines, "decode-1")["output"] == "200 tok/s"
    assert row_of(lines, "decode-2")["running"] == "0", "a worker that has gone is idle"
    (reported,) = [line for line in lines if line.startswith("routers 1")]
    assert "arriving 2.0 requests/s" in reported
    assert "waiting for prefill 4" in reported
    assert "held" not in reported
    assert any("held, for want of workers, 5" in line for line in shown(fleet(num_held=5)))


def test_the_busiest_worker_of_a_pool_stands_first() -> None:
    lines = shown(fleet())
    names = [line.split()[0] for line in lines if line.startswith(("decode-", "prefill-"))]
    assert names == ["decode-1", "decode-0", "decode-2", "prefill-0"]


def test_a_fleet_without_routers_and_workers_is_reported_as_one() -> None:
    assert "no router reports" in shown(Fleet())


def test_a_router_that_is_silent_is_reported_beside_those_that_report() -> None:
    reported = fleet()
    reported.silent_routers.add(router_id="router-2", silent_s=40.2)
    assert any("routers 1 · silent 1, for 40 s · arriving" in line for line in shown(reported))


def test_the_command_shows_what_the_control_service_reports(control: str, capsys: Capture) -> None:
    assert main(["top", "--control", control]) == 0
    assert row_of(capsys.readouterr().out.splitlines(), "decode-0")["output"] == "588 tok/s"


def test_a_watch_goes_on_until_its_service_ends(capsys: Capture) -> None:
    asked = itertools.count()

    class Ends(SmallControl):
        def WatchFleet(self, request: object, context: Any) -> Iterator[Fleet]:  # noqa: N802
            if next(asked) == 2:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the service has ended")
            yield self.fleet()

    with Ends().serve() as address:
        assert main(["top", "--watch", "--control", address]) == 3
    reported = capsys.readouterr()
    assert reported.out.count("Workers") == 2
    assert "the service has ended" in reported.err


@pytest.mark.full
def test_on_a_terminal_a_watch_draws_anew_and_ctrl_c_ends_it(control: str) -> None:
    command = [sys.executable, "-m", "cli.main", "top", "--watch", "--control", control]
    with Terminal(command, os.environ) as terminal:
        for _ in range(3):
            terminal.wait_for(r"decode-0 +decode +live +50%")
        terminal.type(CTRL_C)
        assert terminal.exit_status() == 0


def test_a_table_that_is_too_wide_says_how_many_columns_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = Console(file=(shown := io.StringIO()), width=60)
    monkeypatch.setattr("baton.render.out", lambda: console)
    for columns in (["name"] * 3, ["a name of thirty letters, so it"] * 3):
        console.print(table("Pools", columns, [columns]))
    assert shown.getvalue().count("(2 more columns do not fit)") == 1


# --- `baton status` ------------------------------------------------------------------------------


def pool(name: str, **places: str) -> control_pb2.PoolStatus:
    """`places`: pods by worker ids."""
    return control_pb2.PoolStatus(
        name=name,
        role=DECODE,
        desired_replicas=2,
        live_replicas=1,
        places=[
            control_pb2.PoolPlace(worker_id=name, pod_name=pod) for name, pod in places.items()
        ],
    )


def status_lines(
    *pools: control_pb2.PoolStatus, registered: str = "", fingerprint: bytes = b""
) -> list[list[str]]:
    """The words of each line."""
    ref = common_pb2.WorkerRef(worker_id=registered)
    workers = [control_pb2.FleetWorker(info=control_pb2.WorkerInfo(ref=ref))] if registered else []
    return status_of(Fleet(pools=pools, workers=workers, model_fingerprint=fingerprint))


def status_of(what: Fleet) -> list[list[str]]:
    with out().capture() as capture:
        out().print(status_screen([UnitFleet("", 1.0, what)]))
    return [line.split() for line in capture.get().splitlines()]


def test_each_pool_is_shown_with_its_role_and_size() -> None:
    lines = status_lines(pool("prefill"), pool("decode"))
    assert ["decode", "decode", "1", "of", "2"] in [words[:5] for words in lines]


def test_status_says_which_pools_wait_for_pods() -> None:
    waiting = [line for line in status_of(fleet()) if "wait" in line]
    assert waiting == [["decode:", "2", "wait", "for", "a", "pod", "with", "room"]]


def test_the_model_that_serves_is_shown_once_a_worker_has_registered() -> None:
    for fingerprint, shown in ((b"", []), (b"\x1f\xa0", ["1fa0"])):
        found = status_lines(pool("decode"), fingerprint=fingerprint)
        assert [words[-1] for words in found if "fingerprint" in words] == shown


def test_a_replica_that_starts_is_shown_with_its_pod_until_its_worker_registers() -> None:
    placed = pool("decode", one="pod-a", two="pod-b", three="")
    starting = [line for line in status_lines(placed, registered="one") if "starts" in line]
    assert starting == [["two", "starts", "on", "pod", "pod-b"]]


def test_status_says_who_pairs_with_none() -> None:
    mixture = fleet()
    for each, role, kind in zip(mixture.workers, (PREFILL, DECODE, DECODE), (b"a", b"a", b"b")):
        each.info.role, each.info.kv_fingerprint = role, kind
    assert [words[0] for words in status_of(mixture) if "pairs" in words] == ["decode-1"]
