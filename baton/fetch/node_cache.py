"""A model's folder on a node, shared by its pods.

`<folder>` leads to `<folder>.all` or `<folder>.text`, which appear whole; `<folder>.lock` is held
by who fetches. Who fetches all of it lets those who had the text alone have both.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from baton.fetch.download import Tell

_LOOK_S = 0.5
_TELL_EVERY_S = 30.0


def keep(folder: Path, text_only: bool, fill: Callable[[Path], None], tell: Tell) -> None:
    """Have the model in `folder`. `fill` is given a folder, which may hold what an earlier try left
    there. Raises what `fill` does, and OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(_beside(folder, "lock"), tell):
        whole = _beside(folder, "all")
        if text_only and not whole.is_dir():
            whole = _beside(folder, "text")
        if whole.is_dir():
            tell(f"{folder} is there")
        else:
            partial = whole.with_name(f"{whole.name}.partial")
            partial.mkdir(exist_ok=True)
            fill(partial)
            _sync(partial)
            partial.rename(whole)
        _lead(folder, whole)


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f"{folder.name}.{kind}")


@contextlib.contextmanager
def _locked(path: Path, tell: Tell) -> Iterator[None]:
    """The kernel lets go for whoever dies, and whoever fetches ends when nothing comes for long: so
    nobody waits for more than what a fetch takes."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "rb") as lock:
        told_at = None
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if told_at is None or time.monotonic() - told_at > _TELL_EVERY_S:
                    told_at = time.monotonic()
                    tell("waiting for another pod of this node, which is fetching it")
            time.sleep(_LOOK_S)
        yield


def _lead(folder: Path, whole: Path) -> None:
    """At once, also for those who read there."""
    link = _beside(folder, "link")
    link.unlink(missing_ok=True)
    link.symlink_to(whole.name)
    link.replace(folder)
    _sync(folder.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
