"""Digest of all of a checkpoint's bytes: workers of unequal weights must never exchange KV.

1. Every tensor is cut into chunks; a rank hashes those that begin in its own part of all bytes, on
   its own share of the cores (hashlib lets go of the GIL).
2. The ranks exchange the chunks' hashes.
3. The digest is the hash of every tensor's name, type and shape, and of the chunks' hashes in the
   order of names and offsets: the same for any spread over files and any number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.weights import Checkpoint

_CHUNK_BYTES = 16 << 20
_HASH_BYTES = hashlib.sha256().digest_size


class Ranks(Protocol):
    """The ranks that share the work; `TpGroup` is one."""

    rank: int
    size: int

    def sum_on_host(self, x: torch.Tensor) -> torch.Tensor: ...


def weights_digest(checkpoint: Checkpoint, num_threads: int, ranks: Ranks | None = None) -> str:
    """Hex digest, equal on all ranks; every one of them has to call this.

    Raises CheckpointError, and TpPeerError when a rank is lost.
    """
    names = checkpoint.names()
    chunks = [chunk for name in names for chunk in _chunks(checkpoint.content(name))]
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    mine = _part(chunks, rank, size)
    hashes = torch.zeros(len(chunks), _HASH_BYTES, dtype=torch.uint8)
    with ThreadPoolExecutor(num_threads) as pool:
        for index, found in zip(mine, pool.map(_hash, (chunks[index] for index in mine))):
            hashes[index] = torch.frombuffer(found, dtype=torch.uint8)
    if ranks is not None:
        ranks.sum_on_host(hashes)  # each row is zero on all ranks but one
    whole = hashlib.sha256("\n".join(map(checkpoint.header, names)).encode())
    whole.update(hashes.numpy().data)
    return whole.hexdigest()


def _chunks(content: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
    for start in range(0, len(content), _CHUNK_BYTES):
        yield content[start : start + _CHUNK_BYTES]


def _part(chunks: list[npt.NDArray[np.uint8]], rank: int, size: int) -> list[int]:
    """Indices of the chunks that begin in a rank's equal part of all bytes: one run of names."""
    lengths = np.array([len(chunk) for chunk in chunks], dtype=np.int64)
    starts = lengths.cumsum() - lengths
    owners = starts * size // max(1, lengths.sum())
    return [int(index) for index in np.flatnonzero(owners == rank)]


def _hash(chunk: npt.NDArray[np.uint8]) -> bytearray:
    return bytearray(hashlib.sha256(chunk.data).digest())
