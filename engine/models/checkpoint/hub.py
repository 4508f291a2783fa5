"""A model's files on the Hugging Face hub: which are wanted, and the folder they are fetched to.

`python -m engine.models.checkpoint.hub NAME [REVISION]` fetches in its own process, for callers who
must be able to stop at any time: the hub's threads finish their files before they react to an
interrupt. It prints one JSON object per line: {"fetched_bytes", "total_bytes"} as they change, and
at the end {"folder"} or {"error"}.
"""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

FILES = ("*.json", "*.safetensors", "tokenizer*", "*.jinja")
CONFIG = ("config.json",)
# The same weights once more, as their makers' own programs want them; and nothing in a subfolder
# (original/, onnx/) is read.
_OTHER_FORMS = ["consolidated*", "*/*"]


def snapshot(
    name: str,
    revision: str | None = None,
    tqdm_class: Any = None,
    files: Sequence[str] = FILES,
) -> Path:
    """Find the folder of a hub model, from the local cache or fetched into it. Raises
    CheckpointError.

    `revision`: a branch, tag or commit; None: the main branch. `tqdm_class`: what draws the hub's
    progress; None: its own bars. `files`: patterns of those that are wanted.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(files),
                ignore_patterns=_OTHER_FORMS,
                tqdm_class=tqdm_class,
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        named = f"{name}, revision {revision}," if revision else name
        raise CheckpointError(
            f"{named} is no folder, nor can it be had from the Hugging Face hub: {error}"
        ) from error


def _printing_bars() -> Any:
    """Progress bars that print bytes on standard output. Older hubs only count files, which are not
    printed."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    printed, lock = 0, threading.Lock()  # files come on threads of their own; a bar has no lock

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **settings: Any) -> None:
            settings.pop("name", None)
            super().__init__(*args, **settings | {"file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal printed
            with lock:
                drawn: bool | None = super().update(n)
                if self.unit == "B" and self.n > printed:  # several bars count the same bytes
                    printed = int(self.n)
                    _print(fetched_bytes=printed, total_bytes=int(self.total or 0))
            return drawn

    return Bar


def _print(**values: object) -> None:
    print(json.dumps(values), flush=True)


def main(name: str, revision: str | None = None) -> int:
    try:
        folder = snapshot(name, revision, _printing_bars())
    except CheckpointError as error:
        _print(error=str(error))
        return 1
    _print(folder=str(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
