"""Native code: compiled for this machine at first use, and kept in the user's cache.

A file's name is a digest of sources, flags, C library and CPU, so that a home folder shared by
unequal machines never serves one the other's code. Files in the cache are loaded as code, so it
must be a folder that nobody else can write to. Standard library only.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_COMPILE_TIMEOUT_S = 300.0


class NativeBuildError(Exception):
    """There is no compiler, or it failed, or no folder is safe; the message says which."""


@dataclass(frozen=True)
class Recipe:
    """What a library is made of, and how."""

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    compilers: tuple[str, ...]
    """The first of these that the machine has, and that can compile it, is used."""
    headers: tuple[Path, ...] = ()


def build(recipe: Recipe, cache: Path | None = None) -> Path:
    """The library's path; compiles when the cache has none. Raises NativeBuildError.

    `cache`: a folder to keep it in; None: the user's.
    """
    compilers = [found for name in recipe.compilers if (found := shutil.which(name))]
    if not compilers:
        raise NativeBuildError(f"no compiler ({' or '.join(recipe.compilers)}) on this machine")
    try:
        folder = cache_folder() if cache is None else _own(cache)
        library = folder / f"{recipe.name}-{_digest(recipe)}.so"
        if not library.exists():
            _compile_with_any(recipe, compilers, library)
    except OSError as error:
        raise NativeBuildError(str(error)) from error
    return library


def _compile_with_any(recipe: Recipe, compilers: list[str], library: Path) -> None:
    """Compile with the first compiler that succeeds. Raises NativeBuildError with all failures."""
    log.info("compiling %s for this machine (once; a few seconds)", recipe.name)
    failures = []
    for compiler in compilers:
        try:
            return _compile(recipe, compiler, library)
        except NativeBuildError as error:
            failures.append(str(error))
    raise NativeBuildError("; ".join(failures))


def cache_folder() -> Path:
    """The user's folder below XDG_CACHE_HOME or ~/.cache, or one for temporary files if that is not
    safe.

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


def _digest(recipe: Recipe) -> str:
    """Digest of the sources, headers and flags, and of the machine that the library is for."""
    digest = hashlib.blake2b(digest_size=12)
    for path in (*recipe.sources, *recipe.headers):
        digest.update(path.name.encode() + path.read_bytes())
    for part in (*recipe.flags, *platform.libc_ver(), *_cpu()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _cpu() -> list[str]:
    """What -march=native depends on."""
    lines = [platform.machine()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        wanted = ("flags", "Features", "cpu family", "model\t", "CPU part")
        first = info.read_text().split("\n\n", 1)[0]
        lines += [line for line in first.splitlines() if line.startswith(wanted)]
    return lines
