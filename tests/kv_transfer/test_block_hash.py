"""Block hashes: C and hashlib agree, and a chain is the same however it is extended."""

from __future__ import annotations

import hashlib
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.block_hash import (
    HASH_BYTES,
    SHARED_BY_ALL,
    BlockHash,
    CacheScope,
    chain_hashes,
    chain_root,
    split_hashes,
)

ROOT = chain_root(b"fingerprint")


def oracle(parent: bytes, data: bytes, step: int) -> bytes:
    """The hashes of a chain's blocks of `step` bytes, as hashlib computes them."""
    hashes = b""
    for start in range(0, len(data), step):
        block = parent + data[start : start + step]
        parent = hashlib.blake2b(block, digest_size=HASH_BYTES).digest()
        hashes += parent
    return hashes


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    block_size=st.sampled_from([1, 2, 15, 16, 27, 28, 29, 32, 60, 64, 128]),
    num_blocks=st.integers(0, 5),
)
def test_the_c_code_computes_what_hashlib_does(seed: int, block_size: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    parent = BlockHash(rng.randbytes(HASH_BYTES))
    tokens = np.array(rng.choices(range(1 << 32), k=num_blocks * block_size), dtype=np.uint32)
    expected = oracle(parent, tokens.tobytes(), 4 * block_size)
    assert chain_hashes(parent, SHARED_BY_ALL, tokens, block_size) == expected


@given(
    num_tokens=st.integers(0, 70),
    num_known=st.integers(0, 70),
    num_public=st.integers(0, 70),
    tenant=st.sampled_from(["", "one"]),
)
def test_a_chain_that_is_extended_is_the_one_that_is_computed_at_once(
    num_tokens: int, num_known: int, num_public: int, tenant: str
) -> None:
    scope = CacheScope(tenant, "salt", num_public)
    tokens = np.arange(num_tokens, dtype=np.uint32)
    whole = chain_hashes(ROOT, scope, tokens, 8)
    assert len(whole) == num_tokens // 8 * HASH_BYTES
    num_before = min(num_known, num_tokens) // 8
    begun = chain_hashes(ROOT, scope, tokens[: num_before * 8], 8)
    parent = split_hashes(begun)[-1] if begun else ROOT
    rest = chain_hashes(parent, scope, tokens[num_before * 8 :], 8, num_before)
    assert begun + rest == whole


def test_scopes_share_their_public_blocks_alone() -> None:
    tokens = np.arange(64, dtype=np.uint32)
    scopes = [
        CacheScope(tenant, salt, num_public)
        for tenant in ("", "a", "b", "ab")
        for salt in ("", "a", "b", "ab")
        for num_public in (0, 16, 24)
    ]
    seen: dict[BlockHash, set[CacheScope]] = {}
    for scope in scopes:
        for number, each in enumerate(split_hashes(chain_hashes(ROOT, scope, tokens, 16))):
            if scope.tenant or scope.cache_salt:
                is_public = number < scope.num_public_tokens // 16
                seen.setdefault(each, set()).add(SHARED_BY_ALL if is_public else scope)
    shared = [len(who) for who in seen.values()]
    same_but_for_a_partial_block = 2  # 16 and 24 public tokens: one whole block
    assert max(shared) == same_but_for_a_partial_block
    everyone = split_hashes(chain_hashes(ROOT, SHARED_BY_ALL, tokens, 16))
    assert everyone[0] in seen
    assert not set(everyone[1:]) & seen.keys()
