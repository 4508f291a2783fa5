"""A router that says what it is told to, and its HTTP door."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from tests.router.deployment import Deployment
from tests.router.openai.spoken import CHAT, Http, Speaks, spoken


@pytest.fixture
def speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Speaks:
    return partial(spoken, tmp_path, monkeypatch)


@pytest.fixture
def template() -> str:
    return CHAT


@pytest.fixture
async def door(speaks: Speaks, template: str) -> AsyncIterator[tuple[Deployment, Http]]:
    async with speaks(template) as made:
        yield made


@pytest.fixture
def d(door: tuple[Deployment, Http]) -> Deployment:
    return door[0]


@pytest.fixture
def http(door: tuple[Deployment, Http]) -> Http:
    return door[1]
