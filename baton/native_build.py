"""Native code: compiled for this machine at first use, and kept in the user's cache.

A file's name is a digest of sources, flags, compiler and CPU, so that a home folder shared by
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
_VERSION_TIMEOUT_S = 30.0


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
        sources = _digest_of_sources(recipe)
        libraries, failures = {}, []
        for compiler in compilers:
            try:
                libraries[compiler] = folder / f"{recipe.name}-{_digest(sources, compiler)}.so"
            except NativeBuildError as error:
                failures.append(str(error))
        # What the cache holds serves, even if a compiler fails now.
        kept = next((library for library in libraries.values() if library.exists()), None)
        return kept or _built(recipe, libraries, failures)
    except OSError as error:
        raise NativeBuildError(str(error)) from error


def _built(recipe: Recipe, libraries: dict[str, Path], failures: list[str]) -> Path:
    """Compile with the first compiler that succeeds. Raises NativeBuildError with all failures,
    those of `--version` first."""
    log.info("compiling %s for this machine (once; a few seconds)", recipe.name)
    for compiler, library in libraries.items():
        try:
            _compile(recipe, compiler, library)
        except NativeBuildError as error:
            failures.append(str(error))
        else:
            return library
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
        done = _run(command, _COMPILE_TIMEOUT_S)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise NativeBuildError(f"{compiler} failed: {said[-2000:]}")
        os.replace(built, library)  # atomic: another process may be doing the same


def _digest_of_sources(recipe: Recipe) -> bytes:
    """Digest of the sources, headers, flags and CPU."""
    digest = hashlib.blake2b()
    for path in (*recipe.sources, *recipe.headers):
        digest.update(path.name.encode() + path.read_bytes())
    for part in (" ".join(recipe.flags).encode(), _cpu()):
        digest.update(part + b"\0")
    return digest.digest()


def _digest(sources: bytes, compiler: str) -> str:
    """Raises NativeBuildError where the compiler does not run."""
    version = _run([compiler, "--version"], _VERSION_TIMEOUT_S).stdout
    return hashlib.blake2b(sources + version, digest_size=12).hexdigest()


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    """Raises NativeBuildError where it cannot be run, or takes longer."""
    try:
        return subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"{command[0]} took more than {timeout_s:g} s") from error
    except OSError as error:
        raise NativeBuildError(f"{command[0]} does not run: {error}") from error


def _cpu() -> bytes:
    """What -march=native depends on."""
    lines = [platform.machine()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        wanted = ("flags", "Features", "cpu family", "model\t", "CPU part")
        first = info.read_text().split("\n\n", 1)[0]
        lines += [line for line in first.splitlines() if line.startswith(wanted)]
    return "\n".join(lines).encode()
