"""A running engine takes over its new share of the machine's cores."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine import compute_threads
from engine.config import EngineConfig
from engine.request import StepPlan
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
