"""How fast each prefill worker writes to each decode worker, beside the writer's own rate.

Most links are as fast as their writer: the writer is the bottleneck. Only a link that is at least
1.4 times faster or slower counts apart, in steps of two. So equal placements stay equal.
"""

from __future__ import annotations

import numpy as np

LEARNING_RATE = 0.2  # weight of the newest observation
_MAX_STEPS = 30


class LinkRates:
    """Own the learned rates of links. Rows are writers, columns readers; both are slots."""

    def __init__(self, num_slots: int) -> None:
        self._bytes_per_s = np.full((num_slots, num_slots), np.nan, dtype=np.float32)
        self.slowness = np.ones((num_slots, num_slots), dtype=np.float32)
        """How many times longer a byte takes than at the writer's own rate: powers of two. Written
        in place."""
        # Links of each writer whose slowness is not 1.
        self._num_apart = np.zeros(num_slots, dtype=np.int64)

    def grown(self) -> LinkRates:
        """Twice the slots, the old ones first."""
        size = len(self._num_apart)
        bigger = LinkRates(2 * size)
        bigger._bytes_per_s[:size, :size] = self._bytes_per_s
        bigger.slowness[:size, :size] = self.slowness
        bigger._num_apart[:size] = self._num_apart
        return bigger

    @property
    def are_plain(self) -> bool:
        """All links are as fast as their writers."""
        return not self._num_apart.any()

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
        steps = np.rint(np.log2(writers_rate / rates[seen]))
        self.slowness[writer, seen] = np.exp2(np.clip(steps, -_MAX_STEPS, _MAX_STEPS))
        self._num_apart[writer] = np.count_nonzero(self.slowness[writer] != 1)

    def forget(self, slot: int) -> None:
        """Another worker gets the slot."""
        self._bytes_per_s[slot, :] = self._bytes_per_s[:, slot] = np.nan
        self.slowness[slot, :] = self.slowness[:, slot] = 1
        self._num_apart[:] = np.count_nonzero(self.slowness != 1, axis=1)
