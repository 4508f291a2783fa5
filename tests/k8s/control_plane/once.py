"""A folder that is made once and then shared by everybody who asks for it."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.k8s.control_plane.errors import BuildError

_POLL_S = 0.5


def made_once(target: Path, make: Callable[[Path], None], wait_s: float) -> bool:
    """Make `target` with `make`, unless it is there; returns whether it was made now.

    `make` is given an empty folder, which becomes `target` when it returns: a maker that is cut
    off leaves no half of one. A second maker waits for the first, up to `wait_s`; raises BuildError
    after that.
    """
    if target.is_dir():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(target.name + ".lock"), wait_s):
        if target.is_dir():
            return False
        for left_over in target.parent.glob(f"{target.name}.making-*"):  # its maker was cut off
            shutil.rmtree(left_over, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}.making-"))
        try:
            make(folder)
            folder.rename(target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return True


@contextlib.contextmanager
def _locked(path: Path, wait_s: float) -> Iterator[None]:
    """The kernel lets go of the lock when its holder dies, however it dies."""
    give_up_at = time.monotonic() + wait_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    raise BuildError(f"another build holds {path} for {wait_s:.0f} s") from None
            time.sleep(_POLL_S)
        yield
