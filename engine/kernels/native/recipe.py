"""How the C++ kernels are built. Without torch: `baton up` builds them before any worker starts."""

from __future__ import annotations

from pathlib import Path

from baton.native_build import AMX, AVX2, AVX512, AVX512_BF16, NATIVE_FLAG, Recipe

_SOURCES = Path(__file__).parent
KERNELS = Recipe(
    "kernels",
    sources=tuple(sorted(_SOURCES.glob("*.cpp"))),
    flags=(
        "-O3",
        NATIVE_FLAG,
        "-std=c++17",
        "-fopenmp",
        "-fno-math-errno",
        "-ffp-contract=fast",  # fused multiply-add across functions, GCC's default but not clang's
        "-shared",
        "-fPIC",
    ),
    compilers=("c++", "g++", "clang++"),
    headers=tuple(sorted(_SOURCES.glob("*.h"))),
    targets=(AMX, AVX512_BF16, AVX512, AVX2),
)
