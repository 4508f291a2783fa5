"""Names of what is over, remembered for a while: a late message about it must find nothing new."""

from __future__ import annotations

from kv_transfer.layout import HandoffId


class Tombstones:
    """Each name is kept for `keep_s` from the first time it was buried."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._until_s: dict[HandoffId, float] = {}  # in the order of burial, and so of expiry

    def __len__(self) -> int:
        return len(self._until_s)

    def bury(self, handoff: HandoffId, now_s: float) -> None:
        self._purge(now_s)
        self._until_s.setdefault(handoff, now_s + self._keep_s)

    def holds(self, handoff: HandoffId, now_s: float) -> bool:
        self._purge(now_s)
        return handoff in self._until_s

    def _purge(self, now_s: float) -> None:
        while self._until_s:
            oldest = next(iter(self._until_s))
            if self._until_s[oldest] > now_s:
                return
            del self._until_s[oldest]
