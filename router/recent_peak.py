"""The highest value a figure had lately."""

from __future__ import annotations

from collections import deque


class RecentPeak:
    """Own what is needed of a figure's last `window_s`: the values from which it fell."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._fell_from: deque[tuple[float, int]] = deque()  # (when, value), values falling

    def falls(self, value: int, now_s: float) -> None:
        """The figure had this value until now."""
        while self._fell_from and self._fell_from[-1][1] <= value:
            self._fell_from.pop()
        self._fell_from.append((now_s, value))

    def over(self, value: int, now_s: float) -> int:
        """The highest it has been, `value` being what it is now."""
        while self._fell_from and self._fell_from[0][0] < now_s - self._window_s:
            self._fell_from.popleft()
        return max(value, self._fell_from[0][1]) if self._fell_from else value
