"""What the operator lets all tenants share: the beginning of a prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.errors import InvalidRequestError
from kv_transfer.block_hash import TokenIds
from router.text import Conversation

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublicPrefix:
    beginnings: tuple[TokenIds, ...] = ()
    """The text as token ids, once for each kind of prompt that can begin with it."""

    @classmethod
    def of(
        cls,
        text: str,
        encode: Callable[[str], list[int]],
        encode_chat: Callable[[Conversation], list[int]],
    ) -> PublicPrefix:
        """Encode the text as a plain prompt, and as the system message of a chat."""
        if not text:
            return cls()
        beginnings = [encode(text)]
        try:
            beginnings.append(encode_chat(Conversation([{"role": "system", "content": text}])))
        except InvalidRequestError as error:
            log.info("public_prefix begins no chat: %s", error)
        return cls(tuple(np.array(ids, dtype=np.uint32) for ids in beginnings))

    def num_tokens(self, prompt: TokenIds) -> int:
        """Count the prompt's leading tokens that are public."""
        return max((_num_equal(prompt, each) for each in self.beginnings), default=0)


NO_PREFIX = PublicPrefix()


def _num_equal(prompt: TokenIds, beginning: TokenIds) -> int:
    length = min(len(prompt), len(beginning))
    (different,) = (prompt[:length] != beginning[:length]).nonzero()
    return int(different[0]) if len(different) else length
