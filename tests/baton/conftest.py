"""What tests of the client and of the command line share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton import render
from baton.client import Client
from tests.baton.both_clients import Connect, LoopedClient
from tests.baton.small_router import Book, SmallControl


@pytest.fixture(autouse=True)
def _fresh_consoles() -> None:
    """Consoles keep the streams they were made with; a test has its own."""
    render.out.cache_clear()
    render.err.cache_clear()


@pytest.fixture(params=[Client, LoopedClient], ids=["Client", "AsyncClient"])
def connect(request: pytest.FixtureRequest) -> Connect:
    """Makes a client of the kind under test."""
    kind: Connect = request.param
    return kind


@pytest.fixture
def book() -> Book:
    return Book()


@pytest.fixture
def control() -> Iterator[str]:
    """The address of a control service."""
    with SmallControl().serve() as address:
        yield address
