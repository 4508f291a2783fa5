"""The C++ kernels. Where they cannot be built, or do not load, the torch kernels serve, and one log
line says why."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

from baton.native_build import NativeBuildError, Recipe, build

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "native"
KERNELS = Recipe(
    "kernels",
    sources=tuple(sorted(_SOURCES.glob("*.cpp"))),
    flags=(
        "-O3",
        "-march=native",
        "-std=c++17",
        "-fopenmp",
        "-fno-math-errno",
        "-shared",
        "-fPIC",
    ),
    compilers=("c++", "g++", "clang++"),
    headers=tuple(sorted(_SOURCES.glob("*.h"))),
)


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The kernels' functions, or None where torch has to do."""
    try:
        # torch has loaded its libgomp already, whose threads GCC's kernels share; Clang's have
        # threads of their own.
        return ctypes.CDLL(str(build(KERNELS)))
    except (NativeBuildError, OSError) as error:
        log.warning("no native attention kernels, using torch's: %s", error)
        return None
