"""A model's folder: found on disk or through the Hugging Face hub, and described to the engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from baton.config.engine import EngineConfig
from engine.api import ModelSpec
from engine.errors import CheckpointError
from engine.models.checkpoint.hub import FILES, snapshot
from engine.models.checkpoint.weights import Checkpoint, Ranks, read_json, weights_digest
from engine.models.config import ModelConfig
from engine.models.families.table import model_config
from engine.models.linear.table import quantised
from kv_transfer.layout import kv_fingerprint, model_fingerprint

log = logging.getLogger(__name__)


def resolve(model_path: str, revision: str | None = None, files: Sequence[str] = FILES) -> Path:
    """Find the folder itself, or the hub's snapshot of a model of that name, fetched when needed.

    `revision`: None is the main branch. `files`: at least these are fetched. Raises CheckpointError
    when there is neither.
    """
    folder = Path(model_path)
    return folder if folder.is_dir() else snapshot(model_path, revision, files=files)


def read_config(folder: Path, quantization: str = "none") -> ModelConfig:
    """Read the folder's config.json. `quantization`: `engine.quantization`. Raises ModelError."""
    path = folder / "config.json"
    config = model_config(read_json(path), str(path))
    return replace(config, weights=quantised(config.weights, quantization))


def describe(
    model_path: str, engine: EngineConfig, dtype: str, num_threads: int, ranks: Ranks | None
) -> ModelSpec:
    """Read the config and digest the weights, with the other `ranks`. Raises ModelError and what
    the ranks do."""
    folder, max_model_len = resolve(model_path), engine.max_model_len
    config = read_config(folder, engine.quantization)
    layout = config.kv_layout(engine.block_size, dtype)
    with Checkpoint(folder) as checkpoint:
        digest = weights_digest(checkpoint, num_threads, ranks)
    longest = config.longest_context
    if max_model_len is not None and max_model_len > longest:
        log.warning("max_model_len is %d: %s has no more", longest, folder)
    return ModelSpec(
        name=folder.name if Path(model_path).is_dir() else model_path,
        layout=layout,
        kv_fingerprint=kv_fingerprint(layout, digest, config=asdict(config)),
        model_fingerprint=model_fingerprint(digest, config=asdict(config)),
        vocab_size=config.vocab_size,
        max_model_len=min(longest, max_model_len) if max_model_len else longest,
        eos_token_ids=_eos_token_ids(folder),
        dtype=dtype,
    )


def _eos_token_ids(folder: Path) -> frozenset[int]:
    """End-of-sequence ids from generation_config.json if it has them, else from config.json."""
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).exists():
            continue
        found = read_json(folder / name).get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(token_id) is int and 0 <= token_id < 1 << 32 for token_id in ids):
            raise CheckpointError(f"{folder / name}: eos_token_id: not token ids: {found!r}")
        return frozenset(ids)
    return frozenset()
