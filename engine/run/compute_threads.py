"""Number of threads this process computes with: its share of the machine's cores.

torch keeps the number for each thread that calls it, so the stepping thread applies a new number
between two steps. Whoever divides the cores calls `want`, from any thread. A runner on a CPU calls
`wanted` before each step.
"""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of the container: microseconds in each period, and that
_wanted: int | None = None


def want(num_threads: int | None) -> None:
    """Set the number for the next step on. None keeps the present number."""
    global _wanted
    _wanted = num_threads


def wanted() -> int | None:
    return _wanted


def share(num_ranks: int) -> int:
    """Threads for each of `num_ranks` ranks that share the cores of this process: those that it may
    run on, or its container's quota if that is less."""
    num_cores = len(os.sched_getaffinity(0))
    quota, period = _QUOTA.read_text().split() if _QUOTA.exists() else ("max", "")
    if quota != "max":
        num_cores = min(num_cores, int(quota) // int(period))
    return max(1, num_cores // num_ranks)
