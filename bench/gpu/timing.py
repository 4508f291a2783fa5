"""How long work on a device takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_ROUNDS = 10
_WARM_UP = 3
_LONG_ROUND_S = 1.0


def wait_for(device: torch.device) -> None:
    """Return once the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_s(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of `work` on the device, by its own clock; on a CPU by ours."""
    for _ in range(_WARM_UP):
        first_s = host_s(work, device)
    rounds = _ROUNDS if first_s < _LONG_ROUND_S else 1
    return statistics.median(_once_s(work, device) for _ in range(rounds))


def host_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done it, by the host's clock."""
    wait_for(device)
    start = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - start


def _once_s(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        return host_s(work, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return elapsed_ms / 1e3
