"""Handoffs between two processes whose KV lies on the GPU, beside a copy on the device.

As `bench.handoff`, over CUDA memory: scattered blocks go from one process's pool into the other's
by UCX (cuda_ipc where it serves), and every byte is counted at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import uvloop

from baton.config.transfer import TransferConfig
from bench import handoff
from bench.gpu.speed import device_s
from bench.report import Report
from cluster.preflight.handoff import LoneRank
from kv_transfer.layout import BlockId


class DeviceCopy:
    """A copy of as many bytes between two buffers on the device."""

    def __init__(self, worker: LoneRank, block_bytes: int, num_layers: int) -> None:
        self._device = worker.memory.buffer.device
        self._bytes_per_block = block_bytes * num_layers

    def seconds(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> float:
        num_bytes = len(sources) * self._bytes_per_block
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        return device_s([lambda: target.copy_(source)], self._device)


def run(device: torch.device, report: Report) -> None:
    on_gpu = device.type == "cuda"
    sizes = (
        [(runs, size) for runs in handoff.NUM_RUNS for size in handoff.BLOCK_BYTES]
        if on_gpu
        else [(handoff.NUM_RUNS[0], handoff.BLOCK_BYTES[0])]
    )
    rows = [_row(_measure(device, *size, rounds=15 if on_gpu else 2)) for size in sizes]
    header = (
        *("blocks", "local copy GB/s", "put GB/s", "of the copy", "handoff GB/s", "of the copy"),
        *("exposed us", "answer us", "over"),
    )
    report.add(f"Handoffs between two processes, KV on {device}", header, rows)


def _measure(device: torch.device, num_runs: int, block_bytes: int, rounds: int) -> handoff.Result:

    def copy_of(worker: LoneRank) -> handoff.LocalCopy:
        if device.type == "cpu":
            return handoff.Memcpy(worker)
        return DeviceCopy(worker, block_bytes, handoff.NUM_LAYERS)

    on = "cpu" if device.type == "cpu" else f"cuda:{torch.cuda.current_device()}"
    return uvloop.run(handoff.measure(num_runs, block_bytes, rounds, TransferConfig(), on, copy_of))


def _row(result: handoff.Result) -> tuple[str, ...]:
    return (
        f"{result.num_runs:,} of {result.block_bytes >> 10} KiB",
        f"{result.memcpy_gb_s:.1f}",
        *(f"{result.put_gb_s:.1f}", f"{result.put_gb_s / result.memcpy_gb_s:.2f}"),
        *(f"{result.handoff_gb_s:.1f}", f"{result.handoff_gb_s / result.memcpy_gb_s:.2f}"),
        *(f"{result.exposed_us:.0f}", f"{result.answer_us:.0f}", " ".join(result.lanes)),
    )
