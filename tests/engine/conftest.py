"""A machine without a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.kernels.native.native_kernels import native_library


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """For the processes that a test starts, too: torch's kernels serve."""
    (empty := tmp_path / "no-programs").mkdir()
    monkeypatch.setenv("PATH", str(empty))
    native_library.cache_clear()
    assert native_library() is None
    yield
    native_library.cache_clear()
