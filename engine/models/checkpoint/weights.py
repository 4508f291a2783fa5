"""Tensors of a Hugging Face model folder, mapped: only its digest reads all of it.

A `Checkpoint` checks every name and shape that is asked of it and, at the end, that nothing in the
folder was left unread: a tensor that the decoder does not know would mean wrong results.

The digest covers all of a checkpoint's bytes: workers of unequal weights never exchange KV.

1. Every tensor is cut into chunks. A rank hashes those that begin in its own part of all bytes, on
   its share of the cores (hashlib releases the GIL).
2. The ranks exchange the chunks' hashes.
3. The digest is the hash of every tensor's name, type and shape, and of the chunks' hashes by name
   and offset. It is the same for any spread over files and any number of ranks.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from baton import model_files
from baton.errors import ConfigError
from engine.errors import CheckpointError

log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Written by some exporters though they follow from the config.
_REDUNDANT = re.compile(r"\.rotary_emb\.inv_freq$")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of the model folder. Raises CheckpointError naming the file."""
    with _as_checkpoint_error():
        return model_files.read_json(path)


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


class Checkpoint:
    """The safetensors files of a folder, single or sharded, as one map of named tensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._unread: set[str] = set()
        for name in self._file_names():
            self._open(name)
        self._check_index()
        self._unread = {name for name in self._file_of if not _REDUNDANT.search(name)}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()  # the maps close with the last reference

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(
        self, name: str, shape: tuple[int, ...], *parts: slice, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Read a tensor, or the part that `parts` select along its leading dimensions.

        `shape` is the whole tensor's. `dtype`: None is any floating-point type. Raises
        CheckpointError when it is missing, or has another shape or type.
        """
        if name not in self._file_of:
            raise CheckpointError(f"{self._folder}: tensor {name} is missing")
        view = self._slice(name)
        found = tuple(view.get_shape())
        if found != shape:
            raise CheckpointError(
                f"{self._folder / self._file_of[name]}: tensor {name} has shape {list(found)}, "
                f"config.json asks for {list(shape)}"
            )
        self._unread.discard(name)
        try:
            part: torch.Tensor = view[parts or (slice(None),)]
        except SafetensorError as error:
            raise CheckpointError(f"{self._folder / self._file_of[name]}: {error}") from error
        if not part.is_floating_point() if dtype is None else part.dtype != dtype:
            raise CheckpointError(
                f"{self._folder / self._file_of[name]}: tensor {name} has dtype {part.dtype}"
            )
        return part

    def source_of(self, name: str) -> str:
        return str(self._folder / self._file_of[name])

    def ignore(self, name: str) -> None:
        """Accept a tensor that may be there and is not needed."""
        self._unread.discard(name)

    def check_all_read(self) -> None:
        """Raise CheckpointError naming tensors that nothing asked for."""
        if self._unread:
            some = sorted(self._unread)
            raise CheckpointError(
                f"{self._folder}: {len(some)} tensors that {self._file_of[some[0]]} has and the "
                f"architecture does not: {', '.join(some[:5])}"
            )

    def names(self) -> list[str]:
        """Names of all tensors, also of those that nothing asks for, sorted."""
        return sorted(self._file_of)

    def header(self, name: str) -> str:
        """A tensor's name, type and shape on one line."""
        view = self._slice(name)
        return f"{name} {view.get_dtype()} {tuple(view.get_shape())}"

    def content(self, name: str) -> npt.NDArray[np.uint8]:
        """All bytes of a tensor, row by row, as the file has them: mapped, not copied.

        Raises CheckpointError for a type that safetensors cannot read.
        """
        file = self._file_of[name]
        try:
            tensor: torch.Tensor = self._files[file].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self._folder / file}: tensor {name}: {error}") from error
        return tensor.reshape(-1).view(torch.uint8).numpy()

    def num_elements(self) -> int:
        """Number of elements of all tensors together."""
        return sum(math.prod(self._slice(name).get_shape()) for name in self._file_of)

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)

    def _file_names(self) -> list[str]:
        """The files to read, chosen as transformers does: a single file is the whole model."""
        has_single, has_index = ((self._folder / f).exists() for f in (SINGLE_FILE, INDEX_FILE))
        if has_single and has_index:
            log.warning("%s: %s is read, %s is not", self._folder, SINGLE_FILE, INDEX_FILE)
        self._is_sharded = has_index and not has_single
        files = sorted(set(self._index().values())) if self._is_sharded else [SINGLE_FILE]
        for name in files:
            with _as_checkpoint_error():
                found = model_files.file_in(self._folder, name)
            if found is None:
                raise CheckpointError(f"{self._folder / name} is missing")
        return files

    def _index(self) -> Mapping[str, str]:
        path = self._folder / INDEX_FILE
        index = read_json(path).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise CheckpointError(f"{path} has no weight_map")
        for tensor, file in index.items():
            if not isinstance(file, str):
                raise CheckpointError(f"{path}: tensor {tensor} is in {file!r}, which is no file")
        return index

    def _open(self, file: str) -> None:
        path = self._folder / file
        try:
            opened = safe_open(path, framework="pt")
            names: list[str] = opened.keys()  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is corrupt or truncated: {error}") from error
        self._files[file] = opened
        for name in names:
            if name in self._file_of:
                raise CheckpointError(f"{path}: tensor {name} is in {self._file_of[name]} too")
            self._file_of[name] = file

    def _check_index(self) -> None:
        if not self._is_sharded:
            return
        for name, file in self._index().items():
            if self._file_of.get(name) != file:
                raise CheckpointError(f"{self._folder / file}: tensor {name} is missing")


_CHUNK_BYTES = 16 << 20


class Ranks(Protocol):
    """The ranks that share the work; `TpGroup` is one."""

    rank: int
    size: int

    def gather(self, value: bytes) -> list[bytes]:
        """Every rank's value, in rank order."""


def weights_digest(checkpoint: Checkpoint, num_threads: int, ranks: Ranks | None = None) -> str:
    """Compute the hex digest, equal on all ranks. Every rank must call this.

    Raises CheckpointError, and TpPeerError when a rank is lost.
    """
    names = checkpoint.names()
    chunks = [chunk for name in names for chunk in _chunks(checkpoint.content(name))]
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    with ThreadPoolExecutor(num_threads) as pool:
        hashes = b"".join(pool.map(_hash, _part(chunks, rank, size)))
    if ranks is not None:
        hashes = b"".join(ranks.gather(hashes))
    whole = hashlib.sha256("\n".join(map(checkpoint.header, names)).encode())
    whole.update(hashes)
    return whole.hexdigest()


def _chunks(content: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
    for start in range(0, len(content), _CHUNK_BYTES):
        yield content[start : start + _CHUNK_BYTES]


def _part(chunks: list[npt.NDArray[np.uint8]], rank: int, size: int) -> list[npt.NDArray[np.uint8]]:
    """Choose the chunks that begin in a rank's equal part of all bytes: one run, after lower
    ranks'."""
    lengths = np.array([len(chunk) for chunk in chunks], dtype=np.int64)
    starts = lengths.cumsum() - lengths
    owners = starts * size // max(1, lengths.sum())
    return [chunk for chunk, owner in zip(chunks, owners) if owner == rank]


def _hash(chunk: npt.NDArray[np.uint8]) -> bytes:
    return hashlib.sha256(chunk.data).digest()
