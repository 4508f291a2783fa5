"""How fast each prefill worker writes to each decode worker, beside the writer's own rate.

Most links are as fast as their writer: the writer is the bottleneck. Only a link that is at least
1.4 times faster or slower counts apart, in steps of two. So decode workers with equal links to all
writers stay few groups, among which a placement is quickly chosen.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LEARNING_RATE = 0.2  # weight of the newest observation
_MAX_STEPS = 30


class LinkRates:
    """Own the learned rates of links. Rows are writers, columns readers; both are slots."""

    def __init__(self, num_slots: int) -> None:
        self._bytes_per_s = np.full((num_slots, num_slots), np.nan, dtype=np.float32)
        self._steps = np.zeros((num_slots, num_slots), dtype=np.int8)
        self._weights = np.random.default_rng(0).integers(1, 1 << 63, num_slots, dtype=np.int64)
        self._sums = np.zeros(num_slots, dtype=np.int64)  # of a reader's steps, with weights
        self._kinds: Ints | None = np.zeros(num_slots, dtype=np.int64)  # None: not known
        self.are_plain = True
        """All links are as fast as their writers."""
        self.most_gained = 1.0
        """How much faster than its writer's rate the fastest link is, at least 1."""

    def grown(self) -> LinkRates:
        """Twice the slots, the old ones first."""
        size = len(self._sums)
        bigger = LinkRates(2 * size)
        bigger._weights[:size] = self._weights
        bigger._bytes_per_s[:size, :size] = self._bytes_per_s
        bigger._steps[:size, :size] = self._steps
        bigger._sums[:size] = self._sums
        bigger._changed()
        return bigger

    @property
    def kinds(self) -> Ints:
        """[slots] A small number, equal for readers whose links are equally many steps from their
        writers' rates, and unequal for others but for a chance of 2**-63."""
        if self._kinds is None:
            _, self._kinds = np.unique(self._sums, return_inverse=True)
        return self._kinds

    def rates(self, writers: Ints, readers: Ints, writers_rates: Floats) -> Floats:
        """[writers, readers] Bytes a second of each link."""
        steps = self._steps[writers[:, None], readers[None, :]]
        return np.ldexp(writers_rates[:, None], steps)

    def observe(self, writer: int, reader: int, bytes_per_s: float, writers_rate: float) -> None:
        """A handoff took place. The first ones are not believed whole: `writers_rate` is what a
        link begins with."""
        known = self._bytes_per_s[writer, reader]
        known = writers_rate if np.isnan(known) else known
        self._bytes_per_s[writer, reader] = known + LEARNING_RATE * (bytes_per_s - known)

    def compare(self, writer: int, writers_rate: float) -> None:
        """The writer's own rate or one of its links has changed."""
        rates = self._bytes_per_s[writer]
        (seen,) = np.isfinite(rates).nonzero()
        if len(seen):
            steps = np.rint(np.log2(rates[seen] / writers_rate))
            self._set(writer, seen, np.clip(steps, -_MAX_STEPS, _MAX_STEPS).astype(np.int8))

    def forget(self, slot: int) -> None:
        """Another worker gets the slot."""
        everyone = np.arange(len(self._sums))
        self._set(slot, everyone, np.zeros_like(self._steps[slot]))
        self._bytes_per_s[slot, :] = self._bytes_per_s[:, slot] = np.nan
        self._steps[:, slot] = self._sums[slot] = 0
        self._changed()

    def _set(self, writer: int, readers: Ints, steps: npt.NDArray[np.int8]) -> None:
        more = steps.astype(np.int64) - self._steps[writer, readers]
        if more.any():
            self._steps[writer, readers] = steps
            self._sums[readers] += more * self._weights[writer]  # wraps around
            self._changed()

    def _changed(self) -> None:
        self._kinds, self.are_plain = None, not self._sums.any()
        self.most_gained = 2.0 ** max(0, int(self._steps.max()))
