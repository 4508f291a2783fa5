"""Files that hold keys and tokens: written for their owner, and who else may read them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, from its first byte on."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def open_to_others(paths: Iterable[Path]) -> list[str]:
    """Return a warning for each file, or file in a folder, that others can read. Its group may
    where it is another user's, as Secrets are that Kubernetes mounts."""
    warnings = []
    for file in (file for path in paths for file in (path, *path.glob("*"))):
        with contextlib.suppress(OSError):
            found = file.stat()
            others = stat.S_IROTH | (stat.S_IRGRP if found.st_uid == os.geteuid() else 0)
            if stat.S_ISREG(found.st_mode) and found.st_mode & others:
                warnings.append(f"{file} holds a secret that other users can read: chmod 600 it")
    return warnings
