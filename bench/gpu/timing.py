"""How long work on a device takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

_ROUNDS = 5
_RUNS = 10
_LONG_RUN_S = 0.3
_HEAD_START_CYCLES = 20_000_000
"""About 10 ms: the host asks for all runs of a round while the device still waits."""
CACHE_BYTES = 256 << 20
"""What no device's cache holds: works that are timed in turn should touch as much together."""

Work = Callable[[], object]


def wait_for(device: torch.device) -> None:
    """Return once the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_s(works: Sequence[Work], device: torch.device) -> float:
    """Median seconds of one work, all of them in turn, by the device's own clock.

    On a CPU by ours. The works do the same over different memory, so that no cache helps.
    """
    first_s = [host_s(work, device) for work in (*works, works[0])][-1]
    if first_s > _LONG_RUN_S:
        return host_s(works[0], device)
    return statistics.median(_round_s(works, device) for _ in range(_ROUNDS))


def host_s(work: Work, device: torch.device) -> float:
    """Seconds until the device has done it, by the host's clock."""
    wait_for(device)
    start = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - start


def _round_s(works: Sequence[Work], device: torch.device) -> float:
    num_runs = max(_RUNS, len(works))
    if device.type != "cuda":
        return host_s(lambda: _run(works, num_runs), device) / num_runs
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    _run(works, num_runs)
    end.record()
    end.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return elapsed_ms / 1e3 / num_runs


def _run(works: Sequence[Work], num_runs: int) -> None:
    for number in range(num_runs):
        works[number % len(works)]()
