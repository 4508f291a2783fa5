"""The fleet as columns of numbers, which placement reckons with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from router.fleet.link_rates import LinkRates

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class FleetArrays:
    """The fleet as columns, one row per worker slot. Owned by `Fleet`; read here.

    Columns are written in place and never replaced: native code keeps their addresses.
    """

    def __init__(self, num_slots: int) -> None:
        n = num_slots
        self.names = [""] * n
        self.kv_class = np.full(n, -1, np.int64)  # workers of one exchange KV; -1: no worker
        self.can_prefill = np.zeros(n, np.bool_)
        self.can_decode = np.zeros(n, np.bool_)
        self.usable = np.zeros(n, np.bool_)  # live, connected, not draining
        self.hold_until_s = np.zeros(n)  # gets nothing before this time
        self.prefill_tokens_per_s = np.ones(n)
        self.prefill_measured_s = np.full(n, -np.inf)  # last reported; infinite: a default stands
        self.decode_step_s = np.zeros(n)
        self.decode_measured_s = np.full(n, -np.inf)
        self.handoff_bytes_per_s = np.ones(n)
        self.kv_bytes_per_token = np.zeros(n)
        self.queued_tokens = np.zeros(n)  # to be prefilled before a new prompt
        self.head_tokens = np.zeros(n)  # of these, the prompt at the head of the queue
        self.head_since_s = np.zeros(n)
        self.running = np.zeros(n)  # requests that decode, or will
        self.max_running = np.ones(n)
        self.free_tokens = np.zeros(n)  # room for KV by this router's bookings
        self.longest_request = np.zeros(n)  # prompt plus output tokens that the worker accepts
        self.max_held_tokens = np.zeros(n)  # by one request at once; infinite: its whole length
        self.unquarantined_tokens = np.full(n, np.inf)  # room beside quarantine; infinite: none is
        self.links = LinkRates(n)

    def grown(self) -> FleetArrays:
        """Return a copy with twice the rows, the old ones first."""
        size = len(self.names)
        bigger = FleetArrays(2 * size)
        for name, column in vars(self).items():
            if name == "links":
                bigger.links = self.links.grown()
            else:
                getattr(bigger, name)[:size] = column
        return bigger
