"""The benchmarks run; what they measure on this machine is nobody's claim."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import checkpoints, demo, engine, machine


@pytest.mark.parametrize(("load", "is_told"), [(0.0, False), (0.6, True)])
def test_a_result_says_loudly_that_other_work_ran_beside_it(
    monkeypatch: pytest.MonkeyPatch, load: float, is_told: bool
) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "getloadavg", lambda: (load * cores, 0.0, 0.0))
    told = machine.describe("make bench")
    assert ("OTHER WORK RAN BESIDE THIS" in told) == is_told
    assert told.startswith("> **OTHER WORK") == is_told


def test_a_cell_whose_rounds_are_long_gets_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def side(name: str) -> float:
        calls.append(name)
        return 3.0

    monkeypatch.setattr(engine, "LONG_ROUND_S", 7.0)
    assert engine.alternate(lambda: side("ours"), lambda: side("theirs")) == (3.0, 3.0, 5)
    assert calls == ["ours", "theirs"] * 6
    monkeypatch.setattr(engine, "LONG_ROUND_S", 5.0)
    assert engine.alternate(lambda: side("ours"), lambda: side("theirs"))[2] == 3


@pytest.mark.full
def test_the_engine_is_measured_beside_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny = checkpoints.Shape(64, 128, 2, 4, 2, 16, 512)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(checkpoints, "SHAPES", {"tiny": tiny})
    monkeypatch.setattr(engine, "PREFILL_LENGTHS", (64,))
    monkeypatch.setattr(engine, "DECODE_BATCHES", (1, 3))
    monkeypatch.setattr(engine, "LARGEST_TOKEN_ID", 500)
    cells = engine.measure("tiny", lambda message: None)
    assert [cell.what for cell in cells] == ["prefill 64", "decode batch 1", "decode batch 3"]
    assert all(cell.baton > 0 and cell.transformers > 0 and cell.rounds == 5 for cell in cells)


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_the_stages_of_a_demo_add_up_to_its_first_token() -> None:
    run = demo.run_once()
    assert [name for name in run.stages if "Ray" in name or "router" in name or "model" in name]
    assert sum(run.stages.values()) == pytest.approx(run.first_token_s)
    assert 0 < run.weights_s < run.first_token_s
    told = demo.table([run])
    for name in (*run.stages, "of these: weights", "to the first token", "target of 20 s"):
        assert name in told
