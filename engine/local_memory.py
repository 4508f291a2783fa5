"""KV memory and a sink for an engine whose blocks nobody else reaches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.request import BlockPush
from kv_transfer.layout import RegionLayout


class LocalKvMemory:
    """A zeroed numpy buffer with the regions one after the other; implements `KvMemory`."""

    def __init__(self, num_regions: int, region_bytes: int, blocks_per_region: int) -> None:
        self.num_regions = num_regions
        self.region_stride_bytes = region_bytes
        self.blocks_per_region = blocks_per_region
        self.buffer: npt.NDArray[np.uint8] = np.zeros(num_regions * region_bytes, np.uint8)

    @classmethod
    def of(cls, region: RegionLayout, num_regions: int) -> LocalKvMemory:
        return cls(num_regions, region.num_bytes(), region.num_blocks)


class LocalDeviceMemory:
    """As `LocalKvMemory`, but a torch tensor on the model's device; implements `KvMemory`."""

    def __init__(self, region: RegionLayout, num_regions: int, device: str) -> None:
        import torch  # which a fake engine does without

        self.num_regions = num_regions
        self.region_stride_bytes = region.num_bytes()
        self.blocks_per_region = region.num_blocks
        self.buffer: torch.Tensor = torch.zeros(
            num_regions * self.region_stride_bytes, dtype=torch.uint8, device=device
        )


class LocalSink:
    """The `KvSink` of an engine that hands nothing over: a push would be a mistake."""

    def message(self, payload: bytes) -> None:
        raise AssertionError(f"nobody is there to receive {len(payload)} bytes")

    def layer_done(self, layer: int, pushes: Sequence[BlockPush]) -> None:
        assert not pushes, f"nobody is there to receive {pushes}"

    def step_done(self) -> None:
        pass
