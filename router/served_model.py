"""Which model the unit behind the registry serves: a router never mixes two.

A registry refuses workers of another model than its first worker's. Where it tells of another model
than before, another unit has taken the place of the old one:

1. Tokens of the old model that clients have seen are not gone on with: NOT_RESUMABLE.
2. The router drops the old workers and what the prefix index holds of them.
3. New requests, and those without a token, go to the new model.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from baton.errors import NotResumableError


def not_resumable() -> NotResumableError:
    return NotResumableError(
        "the model that the request's tokens come from is not served any more;"
        " ask anew under a new id"
    )


class ServedModel:
    """Own the fingerprint that the registry told last."""

    def __init__(self, clock: Callable[[], float], max_stream_s: float) -> None:
        """`max_stream_s`: no stream lives longer."""
        self._clock, self._max_stream_s = clock, max_stream_s
        self._fingerprint = b""
        self._replaced_at_s = -math.inf

    def update(self, fingerprint: bytes) -> bool:
        """Whether it takes the place of another model's. An empty one says nothing: no worker has
        registered yet."""
        if fingerprint in (b"", self._fingerprint):
            return False
        is_replaced = bool(self._fingerprint)
        self._fingerprint = fingerprint
        if is_replaced:
            self._replaced_at_s = self._clock()
        return is_replaced

    def check_resumable(self) -> None:
        """Of a stream that no worker keeps. Raises NotResumableError while its tokens may come from
        the model that was replaced."""
        if self._clock() - self._replaced_at_s <= self._max_stream_s:
            raise not_resumable()
