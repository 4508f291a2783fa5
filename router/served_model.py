"""Which model the unit behind the registry serves: a router never mixes two.

A registry refuses workers of another model than its first worker's. If it reports another model
than before, another unit has taken the old one's place:

1. Streams that have put out tokens end as NOT_RESUMABLE.
2. The router drops the old workers, and with them what the prefix index holds of them.
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
    """Own the fingerprint that the registry reported last."""

    def __init__(self, clock: Callable[[], float], max_stream_s: float) -> None:
        """`max_stream_s`: no stream lives longer."""
        self._clock, self._max_stream_s = clock, max_stream_s
        self._fingerprint = b""
        self._replaced_at_s = -math.inf

    def update(self, fingerprint: bytes) -> bool:
        """Take in a fingerprint; return whether it replaces another model's. An empty one replaces
        nothing: no worker has registered yet."""
        if fingerprint in (b"", self._fingerprint):
            return False
        is_replaced = bool(self._fingerprint)
        self._fingerprint = fingerprint
        if is_replaced:
            self._replaced_at_s = self._clock()
        return is_replaced

    def check_resumable(self) -> None:
        """Raise NotResumableError while a stream that no worker keeps may be of the replaced
        model."""
        if self._clock() - self._replaced_at_s <= self._max_stream_s:
            raise not_resumable()
