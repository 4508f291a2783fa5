"""A worker's transfer side without an engine: two of them hand over bytes, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.config.transfer import TransferConfig
from engine.local_memory import LocalDeviceMemory
from kv_transfer.exporter import Exporter
from kv_transfer.layout import BlockId, HandoffId, KvLayout, LayerGroup, RegionLayout, TensorSpec
from kv_transfer.lease import FirstToken, WorkerIdentity
from kv_transfer.lease_table import LeaseFailure, LeaseTable
from kv_transfer.rank import TransferRank
from kv_transfer.transports import make_transport

_BLOCK_SIZE = 16
_FINGERPRINT = b"lone"
_SWITCH_INTERVAL_S = 0.0002  # as in a worker's process


@dataclass(frozen=True)
class MemoryShape:
    """KV memory of one rank; `block_bytes` of each layer."""

    block_bytes: int
    blocks_per_region: int
    num_layers: int = 8
    num_regions: int = 4
    device: str = "cpu"


@dataclass(frozen=True)
class _Push:
    handoff_id: HandoffId
    group: int
    ordinals: tuple[int, ...]
    block_ids: tuple[BlockId, ...]


class LoneRank:
    """Memory, sink, lease table and exporter. Made on a running event loop."""

    def __init__(self, name: str, shape: MemoryShape, config: TransferConfig) -> None:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self.on_admitted: Callable[[], None] = lambda: None
        """Told on the event loop when all of a handoff is here."""
        tensor = TensorSpec("kv", 1, shape.block_bytes // _BLOCK_SIZE // 2, "bfloat16")
        layout = KvLayout(_BLOCK_SIZE, (LayerGroup(0, shape.num_layers, (tensor,)),))
        self.layout = RegionLayout(layout, 0, 1, shape.blocks_per_region)
        self.transport = make_transport(config)
        if shape.device == "cpu":
            self.memory = self.transport.allocate(
                shape.num_regions, self.layout.num_bytes(), shape.blocks_per_region
            )
        else:
            pool = LocalDeviceMemory(self.layout, shape.num_regions, shape.device)
            self.memory = self.transport.register(
                pool.buffer, shape.num_regions, shape.blocks_per_region
            )
        address = TransferRank.address_of(self.transport, 0)
        self.identity = WorkerIdentity(name, 1, (address,))
        self.rank = TransferRank(
            self.transport, self.memory, self.layout, self.identity, 0, None, config
        )
        self.table = LeaseTable(self.rank, self.identity, _FINGERPRINT, config, self)
        self.exporter = Exporter(
            self.rank, self.identity, _FINGERPRINT, config, self.rank.message, lambda: True
        )

    def push(self, handoff: HandoffId, blocks: Sequence[BlockId], layers: Iterable[int]) -> None:
        """The handoff's first blocks, in the order of the lease."""
        push = _Push(handoff, 0, tuple(range(len(blocks))), tuple(blocks))
        for layer in layers:
            self.rank.layer_done(layer, [push])

    def count(self, value: int) -> int:
        """Bytes of the memory that hold it."""
        return int((self.memory.buffer == value).sum())

    def admitted(self, request_id: str, first: FirstToken) -> None:
        self.on_admitted()

    def failed(self, request_id: str, reason: LeaseFailure) -> None:
        raise RuntimeError(f"{request_id}: {reason}")

    def ended(self, request_id: str, first: FirstToken) -> None:
        raise RuntimeError(f"{request_id}: ended by {first}")

    def quiescent(self, request_id: str) -> None:
        pass

    def close(self) -> None:
        del self.memory
        self.transport.close()
