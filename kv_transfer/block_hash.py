"""Identity of a full KV block across workers: a chained hash of its tokens and all before them.

A chain begins with the KV fingerprint, so blocks of different models never match. The first block
that is not public is hashed with the request's tenant and cache salt. So from there on blocks match
only those of the same tenant and salt: nobody learns from a fast answer what another has asked.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
from collections.abc import Callable
from ctypes import c_char_p, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import NewType

import numpy as np
import numpy.typing as npt

from baton.native_build import NATIVE_FLAG, NativeBuildError, Recipe, build

log = logging.getLogger(__name__)

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
        """What the first block that is not public is hashed with, in place of its parent's hash."""
        for part, name in ((b"tenant", self.tenant), (b"cache_salt", self.cache_salt)):
            if name:
                data = parent + name.encode()
                digest = hashlib.blake2b(data, digest_size=HASH_BYTES, person=part)
                parent = BlockHash(digest.digest())
        return parent


SHARED_BY_ALL = CacheScope()


def chain_root(kv_fingerprint: bytes) -> BlockHash:
    """Parent of every prompt's first block."""
    return BlockHash(hashlib.blake2b(digest_size=HASH_BYTES, key=kv_fingerprint).digest())


def chain_hashes(
    parent: BlockHash,
    scope: CacheScope,
    tokens: TokenIds,
    block_size: int,
    num_before: int = 0,
) -> bytes:
    """Hashes of all full blocks of `tokens`, concatenated; a partial last block has none.

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
    native = native_chain()
    if native is None:
        return python_chain(parent, data, step, num_blocks)
    hashes = ctypes.create_string_buffer(num_blocks * HASH_BYTES)
    native(parent, data, step, num_blocks, hashes)
    return hashes.raw


def python_chain(parent: BlockHash, data: bytes, step: int, num_blocks: int) -> bytes:
    """Hashes of the leading blocks of `step` bytes: what the C code computes 8 times as fast."""
    hashes = bytearray()
    for start in range(0, num_blocks * step, step):
        block = hashlib.blake2b(parent + data[start : start + step], digest_size=HASH_BYTES)
        parent = BlockHash(block.digest())
        hashes += parent
    return bytes(hashes)


@functools.cache
def native_chain() -> Callable[[bytes, bytes, int, int, object], None] | None:
    """The C code; None where it cannot be built, or does not agree with Python. The first call may
    compile for a second."""
    try:
        chain = ctypes.PyDLL(str(build(CHAIN))).baton_chain_hashes  # keeps the GIL: it is quick
    except (NativeBuildError, OSError) as error:
        log.warning("no native block hashes, using Python's: %s", error)
        return None
    chain.argtypes = [c_char_p, c_char_p, c_uint64, c_uint64, c_void_p]
    chain.restype = None
    data, hashes = bytes(range(160)), ctypes.create_string_buffer(2 * HASH_BYTES)
    chain(data, data, 80, 2, hashes)
    if hashes.raw != python_chain(BlockHash(data[:HASH_BYTES]), data, 80, 2):
        log.warning("native block hashes are wrong on this machine, using Python's")
        return None
    return chain


def split_hashes(packed: bytes) -> list[BlockHash]:
    """Split hashes that are concatenated."""
    return [
        BlockHash(packed[start : start + HASH_BYTES]) for start in range(0, len(packed), HASH_BYTES)
    ]
