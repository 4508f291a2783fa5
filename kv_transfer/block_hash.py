"""Identity of a full KV block across workers: a chained hash of its tokens and all before them.

A chain begins with the KV fingerprint, so blocks of different models never match. The first block
that is not public is hashed with the request's tenant and cache salt. So from there on blocks match
only those of the same tenant and salt: nobody learns from a fast answer what another has asked.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable
from ctypes import c_char_p, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import NewType

import numpy as np
import numpy.typing as npt

from baton.native_build import NATIVE_FLAG, Recipe, load

CHAIN = Recipe(
    "block_hash",
    (Path(__file__).with_suffix(".c"),),
    ("-O3", NATIVE_FLAG, "-std=c11", "-shared", "-fPIC"),
    ("cc", "gcc", "clang"),
)
BlockHash = NewType("BlockHash", bytes)
HASH_BYTES = 16

TokenIds = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class CacheScope:
    """Who shares a request's cached blocks: requests of its tenant with its salt. Without either,
    all others that have neither."""

    tenant: str = ""
    cache_salt: str = ""
    num_public_tokens: int = 0
    """Leading tokens that the operator lets all tenants share."""

    def salted(self, parent: BlockHash) -> BlockHash:
        """Return what the first block that is not public is hashed with instead of its parent."""
        for part, name in ((b"tenant", self.tenant), (b"cache_salt", self.cache_salt)):
            if name:
                data = parent + name.encode()
                digest = hashlib.blake2b(data, digest_size=HASH_BYTES, person=part)
                parent = BlockHash(digest.digest())
        return parent


SHARED_BY_ALL = CacheScope()


def chain_root(kv_fingerprint: bytes) -> BlockHash:
    """Return the parent of every prompt's first block."""
    return BlockHash(hashlib.blake2b(digest_size=HASH_BYTES, key=kv_fingerprint).digest())


def chain_hashes(
    parent: BlockHash,
    scope: CacheScope,
    tokens: TokenIds,
    block_size: int,
    num_before: int = 0,
) -> bytes:
    """Hash all full blocks of `tokens`, concatenated; a partial last block has none.

    `parent` is the hash of the block before them, of which there are `num_before`, or the root.
    """
    step = block_size * 4
    num_blocks = len(tokens) // block_size
    data = tokens.astype("<u4", copy=False).tobytes()
    num_public = scope.num_public_tokens // block_size - num_before
    if not 0 <= num_public < num_blocks:  # no block is the first private one
        return _run(parent, data, step, num_blocks)
    public = _run(parent, data, step, num_public)
    parent = scope.salted(BlockHash(public[-HASH_BYTES:]) if public else parent)
    return public + _run(parent, data[num_public * step :], step, num_blocks - num_public)


def _run(parent: BlockHash, data: bytes, step: int, num_blocks: int) -> bytes:
    hashes = ctypes.create_string_buffer(num_blocks * HASH_BYTES)
    native_chain()(parent, data, step, num_blocks, hashes)
    return hashes.raw


@functools.cache
def native_chain() -> Callable[[bytes, bytes, int, int, object], None]:
    """Load the C code; the first call may compile it for a second. Raises NativeBuildError."""
    chain = load(CHAIN).baton_chain_hashes
    chain.argtypes = [c_char_p, c_char_p, c_uint64, c_uint64, c_void_p]
    chain.restype = None
    return chain


def split_hashes(packed: bytes) -> list[BlockHash]:
    """Split hashes that are concatenated."""
    return [
        BlockHash(packed[start : start + HASH_BYTES]) for start in range(0, len(packed), HASH_BYTES)
    ]
