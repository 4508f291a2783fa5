"""A folder in memory that goes with the process that made it, also when it was killed.

Every write of etcd waits for its disk, and so does much of what kubectl keeps.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_MEMORY = Path("/dev/shm")
_NEEDED_BYTES = 1 << 30
_PREFIX = "baton-control-plane"


@contextlib.contextmanager
def scratch_folder(memory: Path = _MEMORY) -> Iterator[Path]:
    """An empty one, until the end of the block; on disk where `memory` has no room."""
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > _NEEDED_BYTES
    place = memory if has_room else Path(tempfile.gettempdir())
    for left_over in place.glob(f"{_PREFIX}.*"):
        pid = left_over.name.split(".")[1]
        if not Path("/proc", pid).exists():
            shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}.{os.getpid()}.", dir=place) as folder:
        yield Path(folder)
