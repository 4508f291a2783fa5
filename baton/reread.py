"""What files say, read again when they change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from baton.errors import ConfigError

T = TypeVar("T")

log = logging.getLogger(__name__)

_Stamp = tuple[tuple[str, int, int, int], ...]


class Reread(Generic[T]):
    """Own what some files say. Any thread may use it."""

    def __init__(self, files: Callable[[], Iterable[Path]], read: Callable[[], T]) -> None:
        """Read `files` by `read`. Raises ConfigError when they cannot be read."""
        self._files, self._read = files, read
        self._looking = threading.Lock()
        self._seen = self._stamp()
        self.value = read()

    def look(self) -> None:
        """Read the files again when they have changed. If one cannot be read nothing changes, and
        the log says so."""
        with self._looking:
            if (stamp := self._stamp()) == self._seen:
                return
            value, problem = self.value, ""
            try:
                value = self._read()
            except ConfigError as error:
                problem = error.message
            if self._stamp() != stamp:
                return  # half of it may be older than the rest: the next look sees them all
            self._seen, self.value = stamp, value
            if problem:  # once
                log.error("what was read before stays in force: %s", problem)
            else:
                folders = {str(Path(name).parent) for name, *_ in stamp}
                log.info("read again: %s", ", ".join(sorted(folders)))

    @property
    def now(self) -> T:
        """Return `value`, after a look."""
        self.look()
        return self.value

    def _stamp(self) -> _Stamp:
        return tuple(map(_stamp_of, self._files()))


def _stamp_of(path: Path) -> tuple[str, int, int, int]:
    """Return a stamp that changes with the file's content. It follows links, since a mounted Secret
    is one."""
    try:
        found = path.stat()
    except OSError:
        return str(path), 0, 0, 0
    return str(path), found.st_ino, found.st_size, found.st_mtime_ns
