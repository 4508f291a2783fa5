"""Tests of the engine on a device, run by `python -m bench.gpu --part tests`.

They use pytest alone: no plugin, no transformers, no checkpoint. `--device cpu` runs them where
there is no GPU, with the kernels that serve on one.
"""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda", choices=("cuda", "cpu"))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    name = request.config.getoption("--device", "cuda")
    if name == "cpu":
        torch.set_num_threads(1)
    return torch.device(name)
