"""The files of a model's folder: where they may lie, and what is JSON. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.errors import ConfigError


def file_in(folder: Path, name: str) -> Path | None:
    """Return a file of a model's folder, or None if there is none. Raises ConfigError.

    A link leads within the folder, or from the hub cache's snapshot to a blob of the same
    repository. Any other could make a router hand out whatever this machine has.
    """
    path = folder / name
    try:
        root, real = folder.resolve(), path.resolve(strict=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="model") from error
    is_blob = root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs"
    if not is_blob and not real.is_relative_to(root):
        raise ConfigError(f"{path} leads out of the model's folder, to {real}", field="model")
    return path if real.is_file() else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a model's folder. Raises ConfigError naming the file."""
    if file_in(path.parent, path.name) is None:
        raise ConfigError(f"{path} is missing", field="model")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # no lone surrogate
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}", field="model") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object", field="model")
    return content
