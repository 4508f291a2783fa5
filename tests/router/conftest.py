"""What several of the router's tests share."""

from __future__ import annotations

import pytest

from router.text import TextModel
from tests.router.deployment import byte_model


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_model(tmp_path_factory.mktemp("byte-model"))
