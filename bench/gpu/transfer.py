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

SIZES = [(runs, size) for runs in handoff.NUM_RUNS for size in handoff.BLOCK_BYTES]


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
    if device.type == "cuda":
        sizes, rounds, on = SIZES, 15, f"cuda:{torch.cuda.current_device()}"
    else:
        sizes, rounds, on = SIZES[:1], 2, "cpu"
    rows = []
    for num_runs, block_bytes in sizes:

        def copy_of(worker: LoneRank, block_bytes: int = block_bytes) -> handoff.LocalCopy:
            if device.type == "cpu":
                return handoff.Memcpy(worker)
            return DeviceCopy(worker, block_bytes, handoff.NUM_LAYERS)

        measuring = handoff.measure(num_runs, block_bytes, rounds, TransferConfig(), on, copy_of)
        result = uvloop.run(measuring)
        rows.append((*result.cells(), " ".join(result.lanes)))
    header = (*handoff.header_of("copy"), "over")
    report.add(f"Handoffs between two processes, KV on {device}", header, rows)
