"""The C++ kernels: compiled for this machine's CPU at first use, and kept in the user's cache.

The file's name is a digest of sources, flags, compiler and CPU, so that a home folder shared by
unequal machines never serves one the other's code. Where nothing can be compiled, or the result
does not load, the torch kernels serve, and one log line says why.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-shared", "-fPIC")
_COMPILERS = ("c++", "g++")
_COMPILE_TIMEOUT_S = 300.0


class NativeBuildError(Exception):
    """There is no compiler, or it failed; the message says which."""


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The kernels' functions, or None where torch has to do."""
    try:
        # torch has loaded its libgomp already: the kernels share its threads.
        return ctypes.CDLL(str(build(default_cache())))
    except (NativeBuildError, OSError) as error:
        log.warning("no native attention kernels, using torch's: %s", error)
        return None


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "baton" / "native"


def build(cache: Path, compilers: tuple[str, ...] = _COMPILERS) -> Path:
    """The compiled library's path; compiles when the cache has none. Raises NativeBuildError."""
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        raise NativeBuildError(f"no C++ compiler ({' or '.join(compilers)}) on this machine")
    library = cache / f"kernels-{_digest(compiler)}.so"
    if library.exists():
        return library
    log.info("compiling the attention kernels for this CPU (once; a few seconds)")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder) / "kernels.so"
        sources = [str(path) for path in sorted(_SOURCES.glob("*.cpp"))]
        _compile([compiler, *_FLAGS, *sources, "-o", str(built)])
        os.replace(built, library)  # atomic: another process may be doing the same
    return library


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"{command[0]} took more than {_COMPILE_TIMEOUT_S} s") from error
    if done.returncode:
        raise NativeBuildError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")


def _digest(compiler: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    for part in (" ".join(_FLAGS).encode(), version, _cpu()):
        digest.update(part + b"\0")
    return digest.hexdigest()


def _cpu() -> bytes:
    """What -march=native depends on."""
    lines = [platform.machine()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        wanted = ("flags", "Features", "cpu family", "model\t", "CPU part")
        first = info.read_text().split("\n\n", 1)[0]
        lines += [line for line in first.splitlines() if line.startswith(wanted)]
    return "\n".join(lines).encode()
