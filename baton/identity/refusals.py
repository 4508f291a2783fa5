"""The log of who was refused and why: once in a while for each peer, however often it comes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_EVERY_S = 60.0
_MAX_PEERS = 1000


class Refusals:
    """Own when each peer was last reported."""

    def __init__(self, log: logging.Logger, now_s: Callable[[], float] = time.monotonic) -> None:
        self._log, self._now_s = log, now_s
        self._told: dict[tuple[str, str], float] = {}

    def tell(self, what: str, peer: str, why: str) -> None:
        """Log a refusal. `peer` is its host, without the port, which is another one each time."""
        now_s, key = self._now_s(), (what, peer)
        if now_s - self._told.get(key, -_EVERY_S) < _EVERY_S:
            return
        if len(self._told) >= _MAX_PEERS:
            self._told.clear()
        self._told[key] = now_s
        self._log.warning("%s from %s is refused: %s", what, peer, why)
