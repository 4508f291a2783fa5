"""`python -m bench.gpu`: the same code in small on a CPU, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.gpu import speed
from bench.report import Report
from tests.bare_machine import bare_environment

ROOT = Path(__file__).parents[2]


def run_on_cpu(
    name: str, folder: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--part", name, "--out", folder],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def rows_of(table: str) -> list[list[str]]:
    """The cells of a Markdown table."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.timeout(400)  # a process that runs tests, perhaps beside others
@pytest.mark.parametrize(
    ("name", "titles"),
    [
        ("tests", ["tests/engine/gpu"]),
        (
            "speed",
            [
                "Ceilings",
                "Decode attention of one layer, native kernels",
                "Prefill attention of one layer, native kernels",
                "Products of one layer",
                "tiny: prefill",
                "tiny: decode at context 40",
            ],
        ),
    ],
)
def test_a_part_runs_where_little_but_torch_is_installed(
    name: str, titles: list[str], tmp_path: Path
) -> None:
    run = run_on_cpu(name, tmp_path, bare_environment(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    text = (tmp_path / f"{name}.md").read_text()
    assert all(f"### {title}\n" in run.stdout for title in titles)
    _, *tables = text.split("\n### ")
    assert [table.partition("\n")[0] for table in tables] == titles
    assert all(len(rows_of(table)) >= 1 for table in tables)


def test_handoffs_are_measured_where_ucx_is_there(tmp_path: Path) -> None:
    run = run_on_cpu("transfer", tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    ((_, copy, put, *_, lanes),) = rows_of((tmp_path / "transfer.md").read_text())
    assert min(float(copy), float(put)) > 0
    assert lanes


def test_what_transfer_lacks_is_named(tmp_path: Path) -> None:
    run = run_on_cpu("transfer", tmp_path, bare_environment(tmp_path))
    assert run.returncode == 2
    assert "transfer needs libucx-cu12, protobuf and uvloop: " in run.stdout


def test_transfer_is_left_out_where_only_ucx_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libucx", None)
    gpu.run_transfer(torch.device("cpu"), report := Report("transfer", ""))
    assert len(report.left_out) == 1
    assert "libucx" in report.left_out[0]


def test_a_machine_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([], no_gpu=lambda: "the driver is too old") == 2
    assert "no GPU to measure: the driver is too old" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("20 GiB are missing")

    monkeypatch.setattr(speed, "random_model", too_large)
    speed.run(torch.device("cpu"), report := Report("speed", ""))
    assert report.left_out == ["tiny does not fit: 20 GiB are missing"]


def test_a_part_that_fails_keeps_its_tables_and_no_other_part_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(device: torch.device, report: Report) -> None:
        with report.table("Half", ("what", "measured")) as rows:
            rows.append(("copy", "1"))
            raise RuntimeError("the device is gone")

    monkeypatch.setitem(gpu.PARTS, "speed", fails)
    assert gpu.run_here("speed", torch.device("cpu"), tmp_path) == 1
    assert rows_of((tmp_path / "speed.md").read_text()) == [["copy", "1"]]
    statuses = {"tests": 1, "speed": 2, "transfer": 0}
    monkeypatch.setattr(gpu, "run_apart", lambda name, device, out: statuses.pop(name))
    assert gpu.main(["--device", "cpu"]) == 1
    assert not statuses
