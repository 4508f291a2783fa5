"""A prompt and what has been emitted after it, with the block hashes placement needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kv_transfer.block_hash import BlockHash, TokenIds, block_hashes, chain_seed


class PromptBlocks:
    """Own a request's known tokens: the prompt first, then emitted ones. Hashes are kept per
    (kv_fingerprint, block_size) and only extended, never computed twice."""

    def __init__(self, prompt: TokenIds, cache_salt: str) -> None:
        self.num_prompt_tokens = len(prompt)
        self._tokens = np.ascontiguousarray(prompt, dtype=np.uint32)
        self._salt = cache_salt
        self._hashes: dict[tuple[bytes, int], list[BlockHash]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def wire_tokens(self) -> bytes:
        """All known tokens as little-endian uint32."""
        return self._tokens.astype("<u4", copy=False).tobytes()

    def extend_to(self, emitted: Sequence[int]) -> None:
        """Bring the known tokens up to prompt + `emitted` (all tokens emitted so far)."""
        new = emitted[len(self._tokens) - self.num_prompt_tokens :]
        if new:
            self._tokens = np.concatenate([self._tokens, np.asarray(new, dtype=np.uint32)])

    def hashes(self, kv_fingerprint: bytes, block_size: int) -> list[BlockHash]:
        """Hashes of all full blocks, parents first."""
        known = self._hashes.setdefault((kv_fingerprint, block_size), [])
        parent = known[-1] if known else chain_seed(kv_fingerprint, self._salt)
        rest = self._tokens[len(known) * block_size :]
        known.extend(block_hashes(parent, rest, block_size))
        return known
