"""The benchmarks run; what they measure on this machine is nobody's claim."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import __main__ as every
from bench import demo, handoff, path, placement, report, router
from bench.report import markdown

DEMO_MODEL = Path(__file__).parents[2] / "models" / "demo"


@pytest.mark.parametrize(("load", "is_loud"), [(0.0, False), (0.6, True)])
def test_a_result_says_loudly_that_other_work_ran_beside_it(
    monkeypatch: pytest.MonkeyPatch, load: float, is_loud: bool
) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "getloadavg", lambda: (load * cores, 0.0, 0.0))
    printed = report.describe("make bench")
    assert ("OTHER WORK RAN BESIDE THIS" in printed) == is_loud
    assert printed.startswith("> **OTHER WORK") == is_loud


def numbers_of(table: str) -> list[list[float]]:
    """The cells of a Markdown table's rows, but for their names."""
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1, "a row is short of a cell"
    return [[float(cell) for cell in row[1:] if cell.strip() not in ("-", "")] for row in rows[2:]]


def test_a_run_writes_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(every, "RESULTS", tmp_path)
    monkeypatch.setattr(every, "SECTIONS", {"one": "One"})
    monkeypatch.setattr(every, "section", lambda name: "first table\n")
    every.main([])
    (written,) = tmp_path.iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{6}\.md", written.name)
    assert written.read_text().endswith("first table\n")


@pytest.mark.full
@pytest.mark.timeout(120)
def test_the_handoff_is_measured_beside_memcpy() -> None:
    command = [sys.executable, "-m", "bench.handoff", "--rounds", "1"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.match(r"\| blocks +\| memcpy GB/s \| put GB/s \| put/memcpy \| handoff GB/s", printed)
    rows = numbers_of(printed)
    assert len(rows) == len(handoff.NUM_RUNS) * len(handoff.BLOCK_BYTES)
    for memcpy, put, put_share, whole, whole_share, answered_share, exposed_us, answer_us in rows:
        assert 0 < answered_share <= whole_share
        assert put >= whole > 0  # one digit of each is printed
        assert min(memcpy, exposed_us, answer_us) > 0
        assert put / memcpy == pytest.approx(put_share, rel=0.1)
        assert whole / memcpy == pytest.approx(whole_share, rel=0.1)


def rows_of(table: str) -> list[list[str]]:
    lines = [line.strip("|").split("|") for line in table.splitlines()]
    return [[cell.strip() for cell in line] for line in lines[2:]]


@pytest.mark.full
@pytest.mark.timeout(120)
async def test_the_router_is_measured_between_workers_that_cost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = {"NUM_ALONE": 3, "AT_ONCE": 2, "SHORT": 2, "LONG": 6, "NUM_FLOOD_TOKENS": 16}
    for name, value in {**small, "SLOW_MS": 5}.items():
        monkeypatch.setattr(router, name, value)
    printed = await router.report(rounds=1)
    first_tokens, cpu, rates, calls = map(rows_of, printed.split("\n\n")[:4])
    servers = ["null server", "bare proxy", "router", "router, HTTP"]
    direct = ["direct", "direct HTTP"]
    assert [row[0] for row in first_tokens] == [*direct, *servers, *servers, "sglang-router"]
    assert [len(table) for table in (cpu, rates, calls)] == [15, 9, 9]
    assert all(table.pop()[1] == "not installed" for table in (first_tokens, cpu, rates, calls))
    by_name = {row[0]: row for row in first_tokens if row[1] == "no"}
    ttft, added = (float(cell) for cell in by_name["router"][2:5:2])
    assert added == pytest.approx(ttft - float(by_name["direct"][2]), abs=0.02)
    assert all(0 < float(row[-1]) <= 1 for row in (*cpu, *rates)), "messages a token"
    if "not counted" not in printed:
        assert all(float(row[-1]) > 0 for row in calls)


def test_placement_hashes_and_index_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"ROUNDS": 2, "NUM_BLOCKS": 2000, "CHAIN": 10, "NUM_EVENTS": 256, "FLEETS": (8,)}
    for name, value in small.items():
        monkeypatch.setattr(placement, name, value)
    choices, hashes, indexes = map(numbers_of, placement.report().split("\n\n"))
    assert len(choices) == 6
    assert len(hashes) == 2
    assert all(len(row) == 3 for row in indexes)
    assert all(value > 0 for row in (*choices, *hashes, *indexes) for value in row)


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_the_stages_of_the_whole_path_add_up_to_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(path, "PROMPT_LENGTHS", (32,))
    monkeypatch.setattr(path, "ROUNDS", 1)
    monkeypatch.setattr(path, "WARM_UPS", 1)
    rows = path.measure(DEMO_MODEL, 2000)
    disaggregated, alone = numbers_of(markdown(path.HEADER, [row.cells() for row in rows]))
    assert (len(disaggregated), len(alone)) == (14, 11)  # nothing is handed off on one worker
    for ttft, beyond_prefill, *stages in (disaggregated[:9], alone[:9]):
        assert sum(stages) == pytest.approx(ttft, abs=0.1)
        assert all(stage >= 0 for stage in stages)
        prefill = stages[4]
        assert beyond_prefill == pytest.approx(ttft - prefill, abs=0.1)
    assert disaggregated[5] > 0, "the prefill worker's own queue counts"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_engine_is_measured_beside_transformers() -> None:
    command = [sys.executable, "-m", "bench.engine", "--models", "0.1B", "--rounds", "1"]
    command += ["--steps", "2", "--peers", "transformers"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    cells = re.findall(r"^\| 0\.1B (\w+ \d+) +\| +(\d+) \| +(\d+) \|", printed, re.M)
    asked = [*(f"prefill {n}" for n in (512, 2048)), *(f"decode {n}" for n in (1, 8, 32))]
    assert [what for what, *_ in cells] == asked
    assert all(int(ours) > 0 and int(theirs) > 0 for _, ours, theirs in cells)


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_the_stages_of_a_demo_add_up_to_its_first_token() -> None:
    run = demo.run_once()
    assert [name for name in run.stages if "Ray" in name or "router" in name or "model" in name]
    assert sum(run.stages.values()) == pytest.approx(run.first_token_s)
    assert 0 < run.weights_s < run.first_token_s
    printed = demo.table([run])
    for name in (*run.stages, "of these: weights", "to the first token", "target of 20 s"):
        assert name in printed
