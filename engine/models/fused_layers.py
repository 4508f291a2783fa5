"""All layers of a dense decoder in one native call, where one rank has the whole model.

Between its parts nothing returns to Python and nothing is laid out anew. Layers that cannot run so
(experts, sizes that are no multiple of 32, a machine without a compiler) run one kernel at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p

import torch

from engine.kernels.native import huge_pages
from engine.kernels.native.native_kernels import (
    GATES,
    HEAD_DIM_STEP,
    NativeKernels,
    Pool,
    native_library,
    pool_of,
)
from engine.kernels.native.packed_weights import TILE_ROWS, Weight
from engine.kernels.paged_kv import PagedKv
from engine.kernels.protocol import AttentionShape, Rotation
from engine.kernels.step_batch import StepBatch
from engine.models.config import ModelConfig
from engine.models.loading import DecoderWeights, LayerWeights
from engine.models.mlp import DenseMlp

_QKV_PADDING = 32  # kQkvPadding in native/layers.cpp


class _Layer(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("attention_out_norm", c_void_p),
        ("mlp_out_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", Weight),
        ("out", Weight),
        ("gate_up", Weight),
        ("down", Weight),
        ("pool", Pool),
        ("group", c_int64),
        ("window", c_int64),
        ("rotation", c_int64),
    )


class _Group(Structure):
    _fields_ = (("slots", c_void_p), ("tables", c_void_p), ("table_starts", c_void_p))


class _Rotation(Structure):
    _fields_ = (("cos", c_void_p), ("sin", c_void_p))


class _Step(Structure):
    _fields_ = (
        ("residual", c_void_p),
        ("rows", c_int64),
        ("hidden", c_int64),
        ("num_heads", c_int64),
        ("rotations", POINTER(_Rotation)),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("num_seqs", c_int64),
        ("groups", POINTER(_Group)),
        ("tiles", c_void_p),
        ("more_tiles", c_void_p),
        ("qkv", c_void_p),
        ("queries", c_void_p),
        ("added", c_void_p),
        ("eps", c_float),
        ("scale", c_float),
        ("gate", c_int64),
    )


class FusedLayers:
    """Owns the room that a step computes in, kept from step to step."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: DecoderWeights,
        native: Sequence[tuple[Weight, ...]],
        config: ModelConfig,
        shape: AttentionShape,
    ) -> None:
        self._run = library.baton_layers
        self._run.argtypes = (c_void_p, c_int64, POINTER(_Step), c_int, c_int)
        self._run.restype = None
        self._weights = weights  # whose memory the layers name
        self._shape = shape
        self._layers = (_Layer * len(native))()
        self._gate = GATES[config.activation]
        for layer, (qkv, out, gate_up, down), of, window, rope in zip(
            self._layers, native, weights.layers, config.windows, config.ropes, strict=True
        ):
            layer.input_norm, layer.mlp_norm = of.input_norm.data_ptr(), of.mlp_norm.data_ptr()
            layer.attention_out_norm = _address(of.attention_out_norm)
            layer.mlp_out_norm = _address(of.mlp_out_norm)
            if of.head_norms is not None:
                layer.query_norm = of.head_norms.query.data_ptr()
                layer.key_norm = of.head_norms.key.data_ptr()
            layer.qkv, layer.out, layer.gate_up, layer.down = qkv, out, gate_up, down
            layer.window, layer.rotation = window or 0, config.distinct_ropes.index(rope)
        qkv, out, _, down = native[0]
        qkv_width = qkv.outputs + _QKV_PADDING
        self._widths = (max(qkv.inputs, out.inputs), down.inputs, qkv_width, out.inputs, qkv.inputs)
        self._room = huge_pages.take(0)
        self._kv: PagedKv | None = None

    @classmethod
    def of(
        cls,
        weights: DecoderWeights,
        config: ModelConfig,
        shape: AttentionShape,
        kernels: object,
    ) -> FusedLayers | None:
        """None if these layers have to run one kernel at a time."""
        library = native_library() if isinstance(kernels, NativeKernels) else None
        native = [_native(layer) for layer in weights.layers]
        if library is None or not native or shape.head_dim % HEAD_DIM_STEP:
            return None
        found = [layer for layer in native if layer is not None]
        if len(found) < len(native) or len({tuple(w.inputs for w in p) for p in found}) > 1:
            return None
        return cls(library, weights, found, config, shape)

    def forward(
        self,
        residual: torch.Tensor,
        batch: StepBatch,
        rotations: Sequence[Rotation],
        kv: PagedKv,
        layer_done: Callable[[int], None] | None,
    ) -> None:
        """Run the step's tokens through all layers: `residual` [n, hidden] in place, and their KV.

        One call for each layer if `layer_done` is there to be called after each.
        """
        self._take_pool(kv)
        groups = (_Group * len(batch.groups))()
        for native, group in zip(groups, batch.groups):
            native.slots, native.tables = group.slots.data_ptr(), group.tables.data_ptr()
            native.table_starts = group.table_starts.ctypes.data
        turns = (_Rotation * len(rotations))(
            *(_Rotation(each.cos.data_ptr(), each.sin.data_ptr()) for each in rotations)
        )
        rows, item = len(residual), residual.element_size()
        step = _Step(
            residual.data_ptr(), rows, residual.shape[1], self._shape.num_heads, turns,
            batch.query_starts.ctypes.data, batch.context_lens.ctypes.data, batch.num_seqs, groups,
            *self._rooms(rows, item), self._shape.eps, self._shape.scale, self._gate,
        )  # fmt: skip
        kind = residual.dtype == torch.bfloat16, torch.get_num_threads()
        count = len(self._layers)
        if layer_done is None:
            self._run(self._layers, count, byref(step), *kind)
            return
        for index in range(count):
            self._run(byref(self._layers[index]), 1, byref(step), *kind)
            layer_done(index)

    def _take_pool(self, kv: PagedKv) -> None:
        if self._kv is kv:
            return
        self._kv = kv
        for index, layer in enumerate(self._layers):
            layer.pool = pool_of(kv.layers[index])
            layer.group = kv.layout.group_of_layer(index)

    def _rooms(self, rows: int, item: int) -> list[int]:
        """Addresses of room for a step of so many rows, each at a page."""
        rows += TILE_ROWS
        sizes = [-(-rows * width * item // 4096) * 4096 for width in self._widths]
        if sum(sizes) > len(self._room):
            self._room = huge_pages.take(sum(sizes))
        start, addresses = self._room.data_ptr(), []
        for size in sizes:
            addresses.append(start)
            start += size
        return addresses


def _address(norm: torch.Tensor | None) -> int | None:
    return None if norm is None else norm.data_ptr()


def _native(layer: LayerWeights) -> tuple[Weight, ...] | None:
    if not isinstance(layer.mlp, DenseMlp):
        return None
    linears = (layer.qkv, layer.attention_out, layer.mlp.gate_up, layer.mlp.down)
    found = tuple(linear.native for linear in linears if linear.native is not None)
    return found if len(found) == len(linears) else None
