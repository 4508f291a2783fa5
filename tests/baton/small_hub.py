"""A Hugging Face hub of one repository on this machine, and its files in a hub cache."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from tests.baton.fetch.checkpoint_server import CheckpointServer

COMMIT = "c" * 40


class SmallHub(CheckpointServer):
    """Serves `files` (path to content), a revision of the repository `name`; a context manager."""

    def __init__(
        self,
        name: str,
        files: Mapping[str, bytes],
        revision: str = "main",
        host: str = "127.0.0.1",
    ) -> None:
        self._root = f"{name}/resolve/{COMMIT}/"
        commit = {"id": name, "sha": COMMIT, "siblings": []}
        tree = [
            {"type": "file", "path": path, "size": len(content), "oid": path}
            for path, content in files.items()
        ]
        served = {f"{self._root}{path}": content for path, content in files.items()}
        described = {f"revision/{revision}": commit, f"tree/{COMMIT}": tree}
        for path, answer in described.items():
            served[f"api/models/{name}/{path}"] = json.dumps(answer).encode()
        super().__init__(served, host=host)
        self.headers = {path: {"X-Repo-Commit": COMMIT} for path in served}

    def stop_half_way(self, file: str) -> None:
        """Send half of a file, and the rest when the hub ends."""
        self.cuts[f"{self._root}{file}"] = [-1]

    def sent(self) -> list[str]:
        """The repository's files that were sent."""
        paths = [path for path in self.paths() if path.startswith(self._root)]
        return [path.removeprefix(self._root) for path in paths]


def fill_cache(cache: Path, name: str, files: Mapping[str, bytes], revision: str = "main") -> Path:
    """Lay files out as the hub's cache has them; the snapshot's folder."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for path, content in files.items():
        (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
        blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(content)
        (snapshot / path).symlink_to(os.path.relpath(blob, (snapshot / path).parent))
    (repository / "refs").mkdir()
    (repository / "refs" / revision).write_text(COMMIT)
    return snapshot
