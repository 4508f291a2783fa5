"""Torch views of a rank's KV pool, without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.api import KvMemory
from kv_transfer.layout import DTYPE_BYTES, RegionLayout, TensorSpec

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LayerKv:
    """K and V of one layer: strided views [num_regions, blocks, kv_heads, block_size, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def blocks_per_region(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[3]


class PagedKv:
    """The pool's memory, seen layer by layer. Block ids count through all regions."""

    def __init__(self, memory: KvMemory, regions: RegionLayout, device: torch.device) -> None:
        assert memory.blocks_per_region == regions.num_blocks, (memory, regions)
        self.layout = regions.layout
        self._regions = regions
        self._memory = memory  # its buffer must outlive the views
        self._bytes = _bytes_on(memory.buffer, device)
        self.layers = tuple(self._layer(i) for i in range(self.layout.num_layers()))

    @property
    def num_blocks(self) -> int:
        """Count the blocks of each group, over all regions."""
        return self._memory.num_regions * self._regions.num_blocks

    def _layer(self, layer: int) -> LayerKv:
        group = self.layout.groups[self.layout.group_of_layer(layer)]
        keys, values = (self._view(layer, spec) for spec in group.tensors)
        return LayerKv(keys, values)

    def _view(self, layer: int, spec: TensorSpec) -> torch.Tensor:
        item = DTYPE_BYTES[spec.dtype]
        typed = self._bytes.view(TORCH_DTYPES[spec.dtype])
        heads = len(spec.heads_of_rank(self._regions.tp_rank, self._regions.tp_size))
        block_size, dim = self.layout.block_size, spec.head_dim
        return typed.as_strided(
            (self._memory.num_regions, self._regions.num_blocks, heads, block_size, dim),
            (
                self._memory.region_stride_bytes // item,
                heads * block_size * dim,
                block_size * dim,
                dim,
                1,
            ),
            self._regions.tensor_offset(layer, spec.name) // item,
        )


def _bytes_on(buffer: Any, device: torch.device) -> torch.Tensor:
    """View the pool as a uint8 tensor. Raises TypeError if it does not lie on the device."""
    tensor = buffer if isinstance(buffer, torch.Tensor) else torch.from_numpy(buffer)
    if tensor.device.type != device.type:
        raise TypeError(f"the KV pool of a model on {device} lies on {tensor.device}")
    return tensor
