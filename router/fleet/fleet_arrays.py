"""The fleet as columns of numbers, which placement reckons with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from router.fleet.link_rates import LinkRates

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(eq=False)
class FleetArrays:
    """The fleet as columns, one row per worker slot. Owned by `Fleet`; read here.

    Columns are written in place and never replaced: native code keeps their addresses.
    """

    names: list[str]
    kv_class: Ints  # workers of one class exchange KV; -1: no worker
    can_prefill: Bools
    can_decode: Bools
    usable: Bools  # live, connected, not draining
    hold_until_s: Floats  # gets nothing before this time
    prefill_tokens_per_s: Floats
    prefill_measured_s: Floats  # when that was last reported; minus infinity: it is the default
    decode_step_s: Floats
    decode_measured_s: Floats
    handoff_bytes_per_s: Floats
    kv_bytes_per_token: Floats
    queued_tokens: Floats  # to be prefilled before a new prompt
    head_tokens: Floats  # of these, the prompt at the head of the queue
    head_since_s: Floats
    running: Floats  # requests that decode, or will
    max_running: Floats
    free_tokens: Floats  # room for KV by this router's bookings
    longest_request: Floats  # prompt plus output tokens that the worker accepts
    max_held_tokens: Floats  # that one request holds at once; infinite: its whole length
    unquarantined_tokens: Floats  # room for KV beside quarantine; infinite: nothing is in it
    links: LinkRates

    @classmethod
    def empty(cls, num_slots: int) -> FleetArrays:
        n = num_slots
        return cls(
            names=[""] * n,
            kv_class=np.full(n, -1, dtype=np.int64),
            can_prefill=np.zeros(n, dtype=np.bool_),
            can_decode=np.zeros(n, dtype=np.bool_),
            usable=np.zeros(n, dtype=np.bool_),
            hold_until_s=np.zeros(n),
            prefill_tokens_per_s=np.ones(n),
            prefill_measured_s=np.full(n, -np.inf),
            decode_step_s=np.zeros(n),
            decode_measured_s=np.full(n, -np.inf),
            handoff_bytes_per_s=np.ones(n),
            kv_bytes_per_token=np.zeros(n),
            queued_tokens=np.zeros(n),
            head_tokens=np.zeros(n),
            head_since_s=np.zeros(n),
            running=np.zeros(n),
            max_running=np.ones(n),
            free_tokens=np.zeros(n),
            longest_request=np.zeros(n),
            max_held_tokens=np.zeros(n),
            unquarantined_tokens=np.full(n, np.inf),
            links=LinkRates(n),
        )

    def grown(self) -> FleetArrays:
        """Twice the rows, the old ones first."""
        size = len(self.names)
        bigger = FleetArrays.empty(2 * size)
        for name, column in vars(self).items():
            if name == "links":
                bigger.links = self.links.grown()
            else:
                getattr(bigger, name)[:size] = column
        return bigger
