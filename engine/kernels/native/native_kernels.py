"""The C++ kernels behind the protocol, for tensors on the CPU.

Where they cannot be built or loaded, `pick_kernels` takes torch's, and one log line says why.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p

import torch

from baton.native_build import NativeBuildError, build
from engine.kernels.native.recipe import KERNELS
from engine.kernels.paged_kv import LayerKv
from engine.kernels.protocol import Activation, AttentionShape, HeadNorms, Kernels, Rotation
from engine.kernels.step_batch import GroupBatch, StepBatch
from engine.kernels.torch.torch_kernels import TorchKernels
from engine.kernels.triton import triton_available

log = logging.getLogger(__name__)


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """Return the kernels' library, or None if torch's kernels must serve."""
    try:
        # torch has loaded its libgomp already, whose threads GCC's kernels share; Clang's have
        # threads of their own.
        return ctypes.CDLL(str(build(KERNELS)))
    except (NativeBuildError, OSError) as error:
        log.warning("no native attention kernels, using torch's: %s", error)
        return None


_LANES = 16
HEAD_DIM_STEP = 32
_MAX_HEADS_PER_KV_HEAD = 96
GATES = {None: 0, Activation.SILU: 1, Activation.GELU_TANH: 2}
"""As `Gate` in native/products.h; None is a product that is not gated."""


class Pool(Structure):
    """As `Pool` in native/attention.h; strides in bytes."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("region_stride", c_int64),
        ("block_stride", c_int64),
        ("blocks_per_region", c_int64),
        ("kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
    )


class _Batch(Structure):
    _fields_ = (
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("tables", c_void_p),
        ("table_starts", c_void_p),
        ("num_seqs", c_int64),
        ("num_heads", c_int64),
        ("window", c_int64),
        ("scale", c_float),
    )


class _Rotate(Structure):
    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("slots", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("region_stride", c_int64),
        ("block_stride", c_int64),
        ("blocks_per_region", c_int64),
        ("num_heads", c_int64),
        ("kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
        ("eps", c_float),
    )


class NativeKernels:
    """Shapes that the C++ code does not serve go to the torch kernels.

    The calls release the interpreter and use as many threads as torch does.
    """

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._torch = TorchKernels()
        self._attend = library.baton_attend
        self._attend.argtypes = (c_void_p, c_void_p, POINTER(Pool), POINTER(_Batch), c_int, c_int)
        self._norm = library.baton_norm
        self._norm.argtypes = (*(c_void_p,) * 4, c_int64, c_int64, c_float, c_int, c_int)
        self._gate = library.baton_gate
        self._gate.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_int, c_int, c_int)
        self._rotate = library.baton_rotate
        self._rotate.argtypes = (c_void_p, c_void_p, c_int64, POINTER(_Rotate), c_int, c_int)
        for function in (self._attend, self._norm, self._gate, self._rotate):
            function.restype = None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if not _rows_fit(x):
            return self._torch.rms_norm(x, weight, eps)
        return self._norm_rows(x, None, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if not (_rows_fit(x) and residual.is_contiguous()):
            return self._torch.add_rms_norm(x, residual, weight, eps)
        return self._norm_rows(x, residual, weight, eps)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        width = gate_up.shape[1] // 2
        if width % _LANES or not _rows_fit(gate_up):
            return self._torch.gate(gate_up, activation)
        out = gate_up.new_empty(len(gate_up), width)
        self._gate(
            *(gate_up.data_ptr(), out.data_ptr(), len(gate_up), width, GATES[activation]),
            *_type_and_threads(gate_up),
        )
        return out

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        shape: AttentionShape,
        norms: HeadNorms | None,
        rotation: Rotation,
        kv: LayerKv,
        group: GroupBatch,
    ) -> torch.Tensor:
        if shape.head_dim % HEAD_DIM_STEP or not _rows_fit(qkv):
            return self._torch.rotate_and_write(qkv, shape, norms, rotation, kv, group)
        queries = qkv.new_empty(len(qkv), shape.num_heads, shape.head_dim)
        item = kv.keys.element_size()
        rotate = _Rotate(
            cos=rotation.cos.data_ptr(),
            sin=rotation.sin.data_ptr(),
            query_norm=None if norms is None else norms.query.data_ptr(),
            key_norm=None if norms is None else norms.key.data_ptr(),
            slots=group.slots.data_ptr(),
            keys=kv.keys.data_ptr(),
            values=kv.values.data_ptr(),
            region_stride=kv.keys.stride(0) * item,
            block_stride=kv.keys.stride(1) * item,
            blocks_per_region=kv.blocks_per_region,
            num_heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            block_size=kv.block_size,
            head_dim=shape.head_dim,
            eps=shape.eps,
        )
        self._rotate(
            qkv.data_ptr(), queries.data_ptr(), len(qkv), byref(rotate), *_type_and_threads(qkv)
        )
        return queries

    def attend(
        self,
        queries: torch.Tensor,
        kv: LayerKv,
        batch: StepBatch,
        group: GroupBatch,
        shape: AttentionShape,
        window: int | None,
    ) -> torch.Tensor:
        _, num_heads, head_dim = queries.shape
        if head_dim % HEAD_DIM_STEP or num_heads > _MAX_HEADS_PER_KV_HEAD * kv.keys.shape[2]:
            return self._torch.attend(queries, kv, batch, group, shape, window)
        out = torch.empty_like(queries)
        pool = pool_of(kv)
        described = _Batch(
            batch.query_starts.ctypes.data,
            batch.context_lens.ctypes.data,
            group.tables.data_ptr(),
            group.table_starts.ctypes.data,
            batch.num_seqs,
            num_heads,
            window or 0,
            shape.scale,
        )
        self._attend(
            queries.data_ptr(),
            out.data_ptr(),
            byref(pool),
            byref(described),
            *_type_and_threads(queries),
        )
        return out

    def _norm_rows(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        assert weight.dtype == torch.float32, weight.dtype
        out = torch.empty_like(x)
        self._norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *x.shape,
            eps,
            *_type_and_threads(x),
        )
        return out


def pool_of(kv: LayerKv) -> Pool:
    item = kv.keys.element_size()
    return Pool(
        kv.keys.data_ptr(),
        kv.values.data_ptr(),
        kv.keys.stride(0) * item,
        kv.keys.stride(1) * item,
        kv.blocks_per_region,
        kv.keys.shape[2],
        kv.block_size,
        kv.keys.shape[4],
    )


def _rows_fit(x: torch.Tensor) -> bool:
    return x.shape[1] % _LANES == 0 and x.is_contiguous()


def _type_and_threads(x: torch.Tensor) -> tuple[bool, int]:
    assert x.dtype in (torch.bfloat16, torch.float32), x.dtype
    return x.dtype == torch.bfloat16, torch.get_num_threads()


def pick_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Return the fastest kernels that work here."""
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        library = native_library()
        if library is not None:
            return NativeKernels(library)
    if device.type == "cuda" and triton_available.runs_on("cuda"):
        from engine.kernels.triton.triton_kernels import TritonKernels

        return TritonKernels()
    return TorchKernels()
