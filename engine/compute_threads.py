"""How many threads this process computes with: the share of the machine's cores that it is given.

torch keeps the number for each thread that calls it: one that changes while the process runs is
taken over by the thread that steps, between two steps. Whoever divides the cores calls `want`, from
any thread; a runner on a CPU calls `wanted` before each step.
"""

from __future__ import annotations

import os

_wanted: int | None = None


def want(num_threads: int | None) -> None:
    """From the next step on; None: as many as now."""
    global _wanted
    _wanted = num_threads


def wanted() -> int | None:
    return _wanted


def share(num_ranks: int) -> int:
    """Threads for each of `num_ranks` that divide the cores that this process may run on."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)
