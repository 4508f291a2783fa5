"""A checkpoint, and a node's folder to which it is fetched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.fetch.checkpoint import Fetcher
from baton.fetch.sources import FetchError

SHARDS = {f"model-0000{i}-of-00002.safetensors": bytes([i]) * 3_000_000 for i in (1, 2)}
LARGE = next(iter(SHARDS))
INDEX = {"metadata": {"total_size": 6_000_000}, "weight_map": {f"w.{n}": n for n in SHARDS}}
TEXT = {"config.json": b'{"a": 1}', "tokenizer.json": b"{ }", "chat_template.jinja": b"hi"}
CHECKPOINT = TEXT | SHARDS | {"model.safetensors.index.json": json.dumps(INDEX).encode()}
WITHIN_S = 30
OTHERS = {"README.md": b"read me", "pytorch_model.bin": b"x" * 99}


def under(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": content for name, content in files.items()}


class Node:
    """A folder of a node, to which `uri` is fetched."""

    def __init__(self, uri: str, folder: Path) -> None:
        self.uri, self.folder = uri, folder
        self.environment: dict[str, str] = {}
        self.reported: list[str] = []

    def fetch(self, *, text_only: bool = False) -> None:
        fetcher = Fetcher(self.environment, self.reported.append, pause_s=0)
        fetcher.fetch(self.uri, self.folder, text_only)

    def refused(self) -> str:
        with pytest.raises(FetchError) as caught:
            self.fetch()
        assert not self.folder.exists()
        return str(caught.value)

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}
