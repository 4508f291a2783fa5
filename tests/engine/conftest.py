"""Machines: without a compiler, and with the kernels of other CPUs."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.native_build import build, cpu_features, for_target
from engine.kernels.native import packed_weights
from engine.kernels.native.native_kernels import native_library
from engine.kernels.native.recipe import KERNELS
from kv_transfer.block_hash import native_chain


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """For the processes that a test starts, too: torch's kernels serve."""
    native_chain()  # kept: nothing stands in for it
    (empty := tmp_path / "no-programs").mkdir()
    monkeypatch.setenv("PATH", str(empty))
    native_library.cache_clear()
    assert native_library() is None
    yield
    native_library.cache_clear()


@pytest.fixture(params=[None, *KERNELS.targets], ids=lambda target: target and target.name)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The products as compiled for this CPU, and as images have them for others."""
    library, target = native_library(), request.param
    if library is None or (target is not None and platform.machine() != "x86_64"):
        pytest.skip("no C++ compiler on this machine, or flags of x86-64's")
    if target is not None:
        if lacks := target.lacking(cpu_features()):
            pytest.skip(f"this CPU lacks {lacks}")
        library = ctypes.CDLL(str(build(for_target(KERNELS, target))))
    monkeypatch.setattr(packed_weights, "native_library", lambda: library)
    packed_weights.library.cache_clear()
    yield
    packed_weights.library.cache_clear()
