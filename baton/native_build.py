"""Native code: built ahead for common CPUs, else compiled for this machine at first use.

An image is made with `python -m baton.native_build MODULE:RECIPE...`: libraries for a recipe's
targets lie beside this file. `build` takes the first that this CPU can run, else it compiles into
the user's cache. A file's name there is a digest of sources, flags, C library and CPU, so that a
home folder shared by unequal machines never serves one the other's code. Files in the cache are
loaded as code, so it must be a folder that nobody else can write to. Standard library only.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import pkgutil
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

log = logging.getLogger(__name__)

_COMPILE_TIMEOUT_S = 300.0
PREBUILT = Path(__file__).with_name("prebuilt")
NATIVE_FLAG = "-march=native"


class NativeBuildError(Exception):
    """There is no compiler, or it failed, or no folder is safe; the message says which."""


@dataclass(frozen=True)
class Target:
    """CPUs for which a library is built ahead."""

    name: str
    flags: str
    """The compiler's flags, in place of -march=native."""
    needs: str
    """What the CPU must have, as /proc/cpuinfo calls it."""

    def lacking(self, features: Collection[str]) -> str:
        return ", ".join(each for each in self.needs.split() if each not in features)


X86_64_V2 = Target("x86-64-v2", "-march=x86-64-v2", "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3")
_V3 = f"{X86_64_V2.needs} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
AVX2 = Target("avx2", "-march=x86-64-v3", _V3)
_V4 = f"{_V3} avx512bw avx512cd avx512dq avx512f avx512vl"
AVX512 = Target("avx512", "-march=x86-64-v4", _V4)
_BF16 = f"{AVX512.flags} -mavx512bf16 -mavx512vbmi"  # Cooper Lake alone has only the first
AVX512_BF16 = Target("avx512-bf16", _BF16, f"{_V4} avx512_bf16 avx512vbmi")
AMX = Target("amx", f"{_BF16} -mamx-tile -mamx-bf16", f"{AVX512_BF16.needs} amx_bf16 amx_tile")


@dataclass(frozen=True)
class Recipe:
    """What a library is made of, and how."""

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    compilers: tuple[str, ...]
    """The first of these that the machine has, and that can compile it, is used."""
    headers: tuple[Path, ...] = ()
    targets: tuple[Target, ...] = (AVX2, X86_64_V2)
    """CPUs to build for ahead, on x86-64; the nearest come first."""


def build(recipe: Recipe, cache: Path | None = None, prebuilt: Path = PREBUILT) -> Path:
    """Return the library's path. It is compiled when neither `prebuilt` nor the cache has it.
    Raises NativeBuildError.

    `cache`: a folder to keep it in; None: the user's.
    """
    lacks = ""
    for target, path in _ahead(recipe, prebuilt):
        if path.exists() and not (lacks := target.lacking(cpu_features())):
            return path
    try:
        compilers = _compilers(recipe)
        folder = cache_folder() if cache is None else _own(cache)
        library = folder / f"{recipe.name}-{_digest(recipe, *platform.libc_ver(), *_cpu())}.so"
        if not library.exists():
            log.info("compiling %s for this machine (once; a few seconds)", recipe.name)
            _compile_with_any(recipe, compilers, library)
    except OSError as error:
        raise NativeBuildError(str(error)) from error
    except NativeBuildError as error:
        if not lacks:
            raise
        said = f"{recipe.name} was built ahead for CPUs with {lacks}, which this one lacks; {error}"
        raise NativeBuildError(said) from error
    return library


def load(recipe: Recipe) -> ctypes.PyDLL:
    """Build and load what cannot be done without. Its calls keep the GIL: each must be quick.
    Raises NativeBuildError, which says what is missing."""
    try:
        return ctypes.PyDLL(str(build(recipe)))
    except (NativeBuildError, OSError) as error:
        raise NativeBuildError(
            f"{recipe.name} can neither be loaded nor compiled here: {error}"
        ) from error


def build_ahead(recipe: Recipe, folder: Path = PREBUILT) -> None:
    """Compile the recipe's library for each of its targets. Raises NativeBuildError."""
    folder.mkdir(exist_ok=True)
    for target, path in _ahead(recipe, folder):
        _compile_with_any(for_target(recipe, target), _compilers(recipe), path)


def for_target(recipe: Recipe, target: Target) -> Recipe:
    flags = (flag for flag in recipe.flags if flag != NATIVE_FLAG)
    return replace(recipe, flags=(*flags, *target.flags.split()))


def _ahead(recipe: Recipe, folder: Path) -> Iterator[tuple[Target, Path]]:
    """Find the library for each target that was built ahead from these very sources."""
    of_others = (Target("any", "", ""),)
    for target in recipe.targets if platform.machine() == "x86_64" else of_others:
        yield target, folder / f"{recipe.name}-{target.name}-{_digest(recipe)}.so"


def _compilers(recipe: Recipe) -> list[str]:
    """Find the recipe's compilers that this machine has. Raises NativeBuildError if it has none."""
    compilers = [found for name in recipe.compilers if (found := shutil.which(name))]
    if not compilers:
        raise NativeBuildError(f"no compiler ({' or '.join(recipe.compilers)}) on this machine")
    return compilers


def _compile_with_any(recipe: Recipe, compilers: list[str], library: Path) -> None:
    """Compile with the first compiler that succeeds. Raises NativeBuildError with all failures."""
    failures = []
    for compiler in compilers:
        try:
            return _compile(recipe, compiler, library)
        except NativeBuildError as error:
            failures.append(str(error))
    raise NativeBuildError("; ".join(failures))


def cache_folder() -> Path:
    """Return the user's folder below XDG_CACHE_HOME or ~/.cache, or one for temporary files if that
    is not safe.

    Raises PermissionError when neither is.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    user = os.getuid()
    homes = (
        caches / "baton" / f"native-{user}",
        Path(tempfile.gettempdir()) / f"baton-native-{user}",
    )
    for folder in homes:
        try:
            return _own(folder)
        except OSError as error:
            log.debug("no native code is kept in %s: %s", folder, error)
    raise PermissionError(f"no folder to keep compiled code in: {' and '.join(map(str, homes))}")


def _own(folder: Path) -> Path:
    """Make the folder if need be. Raises OSError unless this user alone may write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()  # a link could be led elsewhere later
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is no folder that this user alone may write to")
    return folder


def _compile(recipe: Recipe, compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [compiler, *recipe.flags, *map(str, recipe.sources), "-o", str(built)]
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=_COMPILE_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise NativeBuildError(f"{compiler} took more than {_COMPILE_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise NativeBuildError(f"{compiler} does not run: {error}") from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise NativeBuildError(f"{compiler} failed: {said[-2000:]}")
        os.replace(built, library)  # atomic: another process may be doing the same


def _digest(recipe: Recipe, *machine: str) -> str:
    """Digest of the sources, headers and flags, and of the machine that the library is for."""
    digest = hashlib.blake2b(digest_size=12)
    for path in (*recipe.sources, *recipe.headers):
        digest.update(path.name.encode() + path.read_bytes())
    for part in (*recipe.flags, *machine):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _cpu() -> list[str]:
    """Describe the CPU, on which -march=native depends."""
    lines = [platform.machine()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        wanted = ("flags", "Features", "cpu family", "model\t", "CPU part")
        first = info.read_text().split("\n\n", 1)[0]
        lines += [line for line in first.splitlines() if line.startswith(wanted)]
    return lines


def cpu_features() -> frozenset[str]:
    """Return what the CPU has, as /proc/cpuinfo calls it; nothing where it cannot be read."""
    return frozenset(word for line in _cpu() if line.startswith("flags") for word in line.split())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        build_ahead(pkgutil.resolve_name(name))
