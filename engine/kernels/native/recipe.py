"""How the C++ kernels are built. Without torch: `baton up` builds them before any worker starts."""

from __future__ import annotations

from pathlib import Path

from baton.native_build import Recipe

_SOURCES = Path(__file__).parent
KERNELS = Recipe(
    "kernels",
    sources=tuple(sorted(_SOURCES.glob("*.cpp"))),
    flags=(
        "-O3",
        "-march=native",
        "-std=c++17",
        "-fopenmp",
        "-fno-math-errno",
        "-ffp-contract=fast",  # fused multiply-add across functions, GCC's default but not clang's
        "-shared",
        "-fPIC",
    ),
    compilers=("c++", "g++", "clang++"),
    headers=tuple(sorted(_SOURCES.glob("*.h"))),
)
