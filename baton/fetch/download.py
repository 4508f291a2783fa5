"""Fetch one file piece by piece. After a cut this process or the next one continues.

An unfinished file is called `<name>.part`; `<name>.whole` beside it says what it is part of. A file
under its own name is whole and matches its checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.fetch.checkpoint_files import WantedFile
from baton.fetch.sources import (
    Content,
    CutOffError,
    DamagedError,
    FetchError,
    ForbiddenError,
    NotThereError,
    Source,
)
from baton.render import num_bytes

Report = Callable[[str], None]

_TRIES = 6
"""Tries in a row in which nothing came before a file is given up."""
_REPORT_EVERY_S = 10.0


@dataclass(frozen=True)
class Whole:
    """What a part is part of, as the source reports it."""

    version: str
    size: int | None
    sha256: str | None


class Download:
    """Fetches files of one source, from several threads. It reports now and then how much of all
    has come."""

    def __init__(
        self,
        source: Source,
        folder: Path,
        report: Report,
        total_bytes: int | None,
        pause_s: float,
    ) -> None:
        """Start with nothing fetched. `pause_s` is the pause after a try in which nothing came; it
        doubles each time."""
        self._source, self._folder, self._report = source, folder, report
        self._pause_s = pause_s
        self.is_over = threading.Event()
        """Set when a file cannot be fetched: nobody needs the rest."""
        self._total_bytes = total_bytes
        self._came_bytes = 0
        self._reported_at = time.monotonic()
        self._lock = threading.Lock()

    def fetch(self, file: WantedFile) -> None:
        """Fetch one file. Raises FetchError, and keeps what came for the next try. Raises
        OSError."""
        whole = self._folder / file.name
        if whole.exists():
            return
        try:
            sha256 = self._all_of(file.name)
        except (NotThereError, ForbiddenError):
            if file.is_needed:
                raise
            return
        part = self._part(file.name)
        self._check(part, file.name, file.sha256 or sha256)
        with part.open("rb") as content:
            os.fsync(content.fileno())
        part.rename(whole)
        self._kept(file.name).unlink(missing_ok=True)
        self._report(f"{file.name}: {num_bytes(whole.stat().st_size)}")

    def _came(self, count: int) -> None:
        with self._lock:
            self._came_bytes += count
            now = time.monotonic()
            if now - self._reported_at < _REPORT_EVERY_S:
                return
            self._reported_at = now
            of = f" of {num_bytes(self._total_bytes)}" if self._total_bytes else ""
            self._report(f"{num_bytes(self._came_bytes)}{of}")

    def _all_of(self, name: str) -> str | None:
        """Fetch the whole file. Returns its digest if the source has one."""
        part, tries = self._part(name), 0
        while True:
            before = part.stat().st_size if part.exists() else 0
            try:
                return self._go_on(name)
            except CutOffError as error:
                if isinstance(error, DamagedError):
                    part.unlink(missing_ok=True)
                came = part.stat().st_size if part.exists() else 0
                tries = 0 if came > before else tries + 1
                if tries == _TRIES:
                    raise FetchError(
                        f"{error.message}: given up after {_TRIES} tries; the next start continues "
                        f"at {num_bytes(came)}"
                    ) from error
                self._report(f"{error.message}; continuing at {num_bytes(came)}")
                if self.is_over.wait(self._pause_s * 2**tries if tries else 0):
                    raise

    def _go_on(self, name: str) -> str | None:
        part, whole = self._part(name), self._whole(name)
        start = part.stat().st_size if part.exists() and whole is not None else 0
        if whole is not None and start == whole.size:
            return whole.sha256
        with self._source.read(name, start, whole.version if whole else None) as content:
            if content.start not in (0, start):
                where = self._source.where(name)
                raise FetchError(f"{where}: the server sent another part than it was asked for")
            if content.start == 0:
                self._begin(name, content)
            with part.open("ab") as file:
                for chunk in content.chunks:
                    if self.is_over.is_set():
                        raise FetchError(f"{name}: not fetched, since another file cannot be")
                    file.write(chunk)
                    self._came(len(chunk))
                size = file.tell()
            if content.size is not None and size != content.size:
                where = f"{self._source.where(name)}: cut off at byte {size}"
                raise CutOffError(f"{where}, and not at its end, {content.size}")
        return content.sha256 or (whole.sha256 if whole and content.start else None)

    def _begin(self, name: str, content: Content) -> None:
        self._part(name).unlink(missing_ok=True)
        self._kept(name).unlink(missing_ok=True)
        if content.version is not None:
            whole = Whole(content.version, content.size, content.sha256)
            self._kept(name).write_text(json.dumps(asdict(whole)))

    def _whole(self, name: str) -> Whole | None:
        try:
            return Whole(**json.loads(self._kept(name).read_text()))
        except (OSError, ValueError, TypeError):  # none, or one that was not written to its end
            return None

    def _check(self, part: Path, name: str, sha256: str | None) -> None:
        if sha256 is None:
            return
        with part.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != sha256:
            part.unlink()
            raise FetchError(
                f"{self._source.where(name)}: its SHA-256 is {found}, not {sha256}. The next "
                "start fetches it anew. If the checksum differs again, the file there is damaged "
                "or its published checksum is out of date"
            )

    def _part(self, name: str) -> Path:
        return self._folder / f"{name}.part"

    def _kept(self, name: str) -> Path:
        return self._folder / f"{name}.whole"
