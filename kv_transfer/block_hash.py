"""Identity of a full KV block across workers: a chained hash of its tokens and all before them.

The chain is seeded with the KV fingerprint and the request's cache salt, so that blocks of
different models or differently salted requests never match.
"""

from __future__ import annotations

import hashlib
from typing import NewType

import numpy as np
import numpy.typing as npt

BlockHash = NewType("BlockHash", bytes)
HASH_BYTES = 16

TokenIds = npt.NDArray[np.uint32]


def chain_seed(kv_fingerprint: bytes, cache_salt: str) -> BlockHash:
    """Parent of a prompt's first block."""
    digest = hashlib.blake2b(cache_salt.encode(), digest_size=HASH_BYTES, key=kv_fingerprint)
    return BlockHash(digest.digest())


def block_hash(parent: BlockHash, tokens: TokenIds) -> BlockHash:
    """Hash of one full block; `tokens` is [block_size] uint32, little-endian when hashed."""
    digest = hashlib.blake2b(parent, digest_size=HASH_BYTES)
    digest.update(tokens.astype("<u4", copy=False).tobytes())
    return BlockHash(digest.digest())


def block_hashes(seed: BlockHash, tokens: TokenIds, block_size: int) -> list[BlockHash]:
    """Hashes of all full blocks of `tokens`, parents first; a partial last block has none."""
    hashes = []
    parent = seed
    data = tokens.astype("<u4", copy=False).tobytes()
    step = block_size * 4
    for start in range(0, len(data) - step + 1, step):
        parent = BlockHash(
            hashlib.blake2b(parent + data[start : start + step], digest_size=HASH_BYTES).digest()
        )
        hashes.append(parent)
    return hashes
