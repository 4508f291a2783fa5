"""`tests/engine` marked `gpu`, under a pytest configuration of its own and without plugins."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import torch

from bench.gpu.report import Report

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 470.0


def run(device: torch.device, report: Report) -> None:
    """One row a file; the failures' own output is printed by pytest."""
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
                command, cwd=_ROOT, env=environment, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            report.failed = True
            report.leave_out(f"the tests were not over after {_TIMEOUT_S:g} s")
            return
        report.failed = done.returncode != 0
        if results.exists():
            rows = _rows(results)
            report.add("tests/engine/gpu", ("file", "passed", "failed", "skipped", "s"), rows)


def _rows(results: Path) -> list[tuple[str, ...]]:
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
