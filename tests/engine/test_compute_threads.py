"""What a rank's share of the cores is, and that a running engine takes a new one over."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from baton.config.engine import EngineConfig
from engine.request import StepPlan
from engine.run import compute_threads
from tests.engine import checkpoints
from tests.engine.driving import set_up


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    compute_threads.want(None)
    torch.set_num_threads(1)


def test_the_thread_that_steps_takes_a_new_number_over_with_its_next_step(tmp_path: Path) -> None:
    config = EngineConfig(dtype="float32", num_blocks=64, num_threads=1)
    checkpoints.save("llama", tmp_path)
    setup = set_up(tmp_path, config)

    def step() -> int:
        setup.runner.run(StepPlan(1, ()), {})
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as stepping:
        assert stepping.submit(step).result() == 1
        for wanted in (3, 1, 2):
            compute_threads.want(wanted)
            assert stepping.submit(step).result() == wanted
        compute_threads.want(None)
        assert stepping.submit(step).result() == 2


@pytest.mark.parametrize(
    ("quota", "num_ranks", "num_threads"),
    [
        (None, 1, 8),
        ("max 100000", 1, 8),
        ("400000 100000", 1, 4),
        ("400000 100000", 2, 2),
        ("350000 100000", 1, 3),
        ("50000 100000", 1, 1),
        ("1600000 100000", 1, 8),
    ],
)
def test_a_containers_quota_of_cores_is_what_its_ranks_divide(
    quota: str | None,
    num_ranks: int,
    num_threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(f"{quota}\n")
    monkeypatch.setattr(compute_threads, "_QUOTA", file)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert compute_threads.share(num_ranks) == num_threads
