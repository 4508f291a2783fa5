"""A step's pushes, layer by layer, and a sink that counts what it hears."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from engine.request import BlockPush, HandoffId
from kv_transfer.layout import BlockId, KvLayout, LayerGroup, TensorSpec
from tests.engine.driving import RecordingSink

TENSORS = (TensorSpec("k", 1, 8, "float32"),)
LAYOUT = KvLayout(16, (LayerGroup(0, 1, TENSORS), LayerGroup(1, 2, TENSORS, 64)))
PUSHES = tuple(BlockPush(HandoffId("h"), group, (0,), (BlockId(3),)) for group in (0, 1))


class Sink(RecordingSink):
    """Counts the layers that it gets; fails at one."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.heard = threading.Semaphore(0)
        self._fails_at = fails_at

    def layer_done(self, layer: int, pushes: Sequence[BlockPush]) -> None:
        if layer == self._fails_at:
            raise ValueError(f"layer {layer}")
        super().layer_done(layer, pushes)
        self.heard.release()
