"""Which processes every replica is made of, on disk.

A process that is stopped tells nobody its pid, and one that Ray has been told to kill is no longer
listed: whoever comes after a supervisor that died could not end them without this.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from kv_transfer.process import ProcessIdentity


@dataclass(frozen=True)
class Entry:
    """The processes of one replica, all on one machine or in one pod."""

    processes: tuple[ProcessIdentity, ...]
    node_id: str
    """Ray's, of where they run."""


class ProcessBook:
    """One file per replica in `folder`, which is made when it is not there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def enter(self, name: str, entry: Entry) -> None:
        """Before they are given anything to hold."""
        self._folder.mkdir(parents=True, exist_ok=True)
        fresh = self._folder / f"{name}.new"
        fresh.write_text(json.dumps(dataclasses.asdict(entry)))
        os.replace(fresh, self._path(name))

    def strike(self, name: str) -> None:
        """Once all of its processes are over."""
        self._path(name).unlink(missing_ok=True)

    def read(self) -> dict[str, Entry]:
        return {path.stem: _parse(path.read_text()) for path in self._folder.glob("*.json")}

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def _parse(text: str) -> Entry:
    found = json.loads(text)
    processes = tuple(ProcessIdentity(**process) for process in found["processes"])
    return Entry(processes, found["node_id"])
