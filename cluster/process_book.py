"""Which processes every replica is made of, on disk.

A process that is stopped tells nobody its pid, and one that Ray has been told to kill is no longer
listed: whoever comes after a supervisor that died could not end them without this.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from kv_transfer.process import ProcessIdentity


class ProcessBook:
    """One file per replica in `folder`, which is made when it is not there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def enter(self, name: str, processes: Sequence[ProcessIdentity]) -> None:
        """Before they are given anything to hold."""
        self._folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps([dataclasses.asdict(process) for process in processes])
        fresh = self._folder / f"{name}.new"
        fresh.write_text(text)
        os.replace(fresh, self._path(name))

    def strike(self, name: str) -> None:
        """Once all of its processes are over."""
        self._path(name).unlink(missing_ok=True)

    def read(self) -> dict[str, tuple[ProcessIdentity, ...]]:
        return {
            path.stem: tuple(ProcessIdentity(**found) for found in json.loads(path.read_text()))
            for path in self._folder.glob("*.json")
        }

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"
