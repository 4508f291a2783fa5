"""Prove the GPU path of this machine, and measure it.

    python -m bench.gpu [--part tests|speed|transfer] [--device cuda|cpu] [--out FOLDER]

Needs Linux, Python 3.12, torch with CUDA, numpy, safetensors and pytest; no Ray, gRPC or network.
`transfer` also needs libucx and protobuf, and names what is missing. Without `--part` each part
runs as a process of its own, for 8 minutes at most. A part prints its tables as they come, and
writes them to PART.md in `--out`. `--device cpu` runs the same code in small sizes, as the
project's tests do.

Exit status: 0, all ran; 1, a test or a part failed; 2, something could not run here and is named.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import torch

from bench import report as reporting
from bench.gpu import speed
from bench.report import Report
from engine.run.auto_choice import why_no_gpu

PART_S = 480.0
_TESTS_S = 470.0
_ROOT = Path(__file__).parents[2]


def run_tests(device: torch.device, report: Report) -> None:
    """Run `tests/engine/gpu` without plugins. One row a file; pytest prints the failures."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [
            *(sys.executable, "-m", "pytest", "-c", str(Path(__file__).with_name("pytest.ini"))),
            *("--rootdir", str(_ROOT), "-m", "gpu", "--device", device.type),
            *("--junit-xml", str(results), "tests/engine/gpu"),
        ]
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        try:
            done = subprocess.run(
                command, cwd=_ROOT, env=environment, timeout=_TESTS_S, check=False
            )
        except subprocess.TimeoutExpired:
            report.failed = True
            report.leave_out(f"the tests were not over after {_TESTS_S:g} s")
            return
        report.failed = done.returncode != 0
        if results.exists():
            rows = _test_rows(results)
            report.add("tests/engine/gpu", ("file", "passed", "failed", "skipped", "s"), rows)


def _test_rows(results: Path) -> list[tuple[str, ...]]:
    counts: dict[str, list[float]] = {}  # passed, failed, skipped, seconds
    for case in ET.parse(results).iter("testcase"):
        file = case.get("classname", "").removeprefix("tests.engine.gpu.")
        row = counts.setdefault(file, [0, 0, 0, 0.0])
        outcomes = {child.tag for child in case}
        row[1 if outcomes & {"failure", "error"} else 2 if "skipped" in outcomes else 0] += 1
        row[3] += float(case.get("time", 0))
    return [
        (file, *(f"{count:.0f}" for count in row[:3]), f"{row[3]:.1f}")
        for file, row in sorted(counts.items())
    ]


def run_transfer(device: torch.device, report: Report) -> None:
    try:
        import libucx  # noqa: F401 - loaded only as the first worker starts

        from bench.gpu import transfer
    except Exception as error:  # noqa: BLE001 - protobuf's VersionError is no ImportError
        report.leave_out(f"transfer needs libucx-cu12, protobuf and uvloop: {error}")
    else:
        transfer.run(device, report)


PARTS = {"tests": run_tests, "speed": speed.run, "transfer": run_transfer}


def describe(device: torch.device, part: str) -> str:
    lines = [reporting.describe(f"python -m bench.gpu --part {part} --device {device}")]
    lines.append(f"- torch: {torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gib = properties.total_memory / (1 << 30)
        ask = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        driver = reporting.first_line(*ask)
        lines.append(f"- GPU: {properties.name}, {gib:.0f} GiB, driver {driver}")
    return "\n".join(lines)


def run_here(part: str, device: torch.device, folder: Path | None) -> int:
    """Run a part here, and return its exit status."""
    report = Report(part, describe(device, part), folder)
    try:
        PARTS[part](device, report)
    except Exception:  # noqa: BLE001 - a part's outermost frame
        traceback.print_exc()
        report.failed = True
    if report.failed:
        return 1
    return 2 if report.left_out else 0


def run_apart(part: str, device: str, out: Path | None) -> int:
    """Run a part in a process of its own, and return its exit status; 1 where its time is over."""
    command = [sys.executable, "-m", "bench.gpu", "--part", part, "--device", device]
    if out is not None:
        command += ["--out", str(out.resolve())]
    try:
        return subprocess.run(command, cwd=_ROOT, timeout=PART_S, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"{part} was not over after {PART_S:g} s", flush=True)
        return 1


def main(arguments: list[str], no_gpu: Callable[[], str | None] = why_no_gpu) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=PARTS, help="one part; default: all, one after the other")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="a folder for PART.md")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and (reason := no_gpu()) is not None:
        print(f"no GPU to measure: {reason}. `--device cpu` runs in small", file=sys.stderr)
        return 2
    if options.part:
        return run_here(options.part, torch.device(options.device), options.out)
    statuses = {run_apart(part, options.device, options.out) for part in PARTS}
    return 1 if statuses - {0, 2} else max(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
