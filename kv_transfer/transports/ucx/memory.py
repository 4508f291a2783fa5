"""The KV pool as UCX sees it: adjacent regions, each mapped separately."""

from __future__ import annotations

import abc
import ctypes
import mmap
from collections.abc import Iterable, Sequence
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_transfer.errors import TransportError
from kv_transfer.transport import Tensor, TransferMemory
from kv_transfer.transports.ucx.binding import (
    MEM_MAP_ALLOCATE,
    MEM_MAP_FIXED,
    MEMORY_CUDA,
    MEMORY_HOST,
    ContextAttributes,
    MemMapParams,
    Ucp,
)
from kv_transfer.transports.ucx.endpoint import SHARED_MEMORY, end_with_their_process, is_shared

_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23
_MAP_FAILED = 2**64 - 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, ctypes.c_long]
_libc.munmap.argtypes = [c_void_p, c_size_t]
_libc.madvise.argtypes = [c_void_p, c_size_t, c_int]


class UcxMemory(TransferMemory, abc.ABC):
    """Regions of equal size at a constant stride, each mapped for UCX separately."""

    def __init__(
        self, ucp: Ucp, context: int, num_regions: int, stride_bytes: int, blocks_per_region: int
    ) -> None:
        super().__init__(num_regions, stride_bytes, blocks_per_region)
        self.handles: tuple[int, ...] = ()
        self._ucp, self._context = ucp, context

    def enter_thread(self) -> None:
        """Make this memory's device current on the thread that will move its bytes."""

    @abc.abstractmethod
    def is_written_by_peers(self, over: frozenset[str]) -> bool:
        """Whether peers write this memory themselves over these lanes. If not, this process writes
        it from what they send."""

    def free(self) -> None:
        """Unmap everything."""
        for handle in self.handles:
            self._ucp.ucp_mem_unmap(self._context, handle)
        self.handles = ()

    def _map(self, base: int, params: MemMapParams) -> None:
        """Map every region, or none. `params` holds everything but address and length."""
        params.field_mask |= 1 | 2
        params.length = self.region_stride_bytes
        try:
            for index in range(self.num_regions):
                params.address = base + index * self.region_stride_bytes
                handle = c_void_p()
                status = self._ucp.ucp_mem_map(self._context, byref(params), byref(handle))
                self._ucp.check(status, f"ucp_mem_map of {self.region_stride_bytes} bytes")
                assert handle.value is not None
                self.handles += (handle.value,)
            self.regions = self.make_regions(base, [self._rkey(handle) for handle in self.handles])
        except TransportError:
            self.free()
            raise

    def _rkey(self, handle: int) -> bytes:
        pointer, length = c_void_p(), c_size_t()
        status = self._ucp.ucp_rkey_pack(self._context, handle, byref(pointer), byref(length))
        self._ucp.check(status, "ucp_rkey_pack")
        rkey = ctypes.string_at(pointer.value or 0, length.value)
        self._ucp.ucp_rkey_buffer_release(pointer)
        return rkey


class AllocatedMemory(UcxMemory):
    """One address range, in which UCX allocates every region at a fixed address.

    Such regions are shared-memory segments (System V or POSIX, UCX's choice) that a peer on this
    machine maps and writes directly. Puts into memory that is only registered go through this
    process instead. Every page is touched here, because a first touch costs several times a put.
    """

    def __init__(
        self, ucp: Ucp, context: int, num_regions: int, region_bytes: int, blocks_per_region: int
    ) -> None:
        stride_bytes = -(-region_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        super().__init__(ucp, context, num_regions, stride_bytes, blocks_per_region)
        self._num_bytes = num_regions * stride_bytes
        self._base = _reserve(self._num_bytes)
        flags = MEM_MAP_ALLOCATE | MEM_MAP_FIXED
        self._map(self._base, MemMapParams(field_mask=4, flags=flags))
        array = (ctypes.c_uint8 * self._num_bytes).from_address(self._base)
        self.buffer = np.frombuffer(memoryview(array), dtype=np.uint8)
        self.buffer[:: mmap.PAGESIZE] = 0
        # UCX falls back to private memory if the system has no segment left.
        self._is_shared = all(is_shared(region.base_address) for region in self.regions)

    def is_written_by_peers(self, over: frozenset[str]) -> bool:
        return self._is_shared and over <= SHARED_MEMORY

    def free(self) -> None:
        """Unmap everything. Views of `buffer` are invalid from here on."""
        super().free()
        _libc.munmap(self._base, self._num_bytes)


class RegisteredMemory(UcxMemory):
    """A tensor that torch has allocated, mainly on a GPU: UCX cannot allocate device memory itself.

    Between two GPUs of a machine a put is a copy through the allocation's IPC handle, which torch's
    expandable segments do not have. Host memory can be registered too. But then this process
    carries out a peer's puts, from messages that outlive the peer, so the end of a writer proves
    nothing. Hence a pool on a CPU is allocated, not registered.
    """

    def __init__(
        self, ucp: Ucp, context: int, tensor: Tensor, num_regions: int, blocks_per_region: int
    ) -> None:
        assert tensor.numel() % num_regions == 0, (tensor.numel(), num_regions)
        stride_bytes = tensor.numel() // num_regions
        super().__init__(ucp, context, num_regions, stride_bytes, blocks_per_region)
        self.buffer = tensor
        memory_type = _memory_type(ucp, context, tensor)
        self._map(tensor.data_ptr(), MemMapParams(field_mask=16, memory_type=memory_type))

    def is_written_by_peers(self, over: frozenset[str]) -> bool:
        return "cuda_ipc" in over and end_with_their_process(over)

    def enter_thread(self) -> None:
        if self.buffer.device.type == "cuda":
            import torch

            torch.cuda.set_device(self.buffer.device)

    def read(self, spans: Sequence[tuple[int, int]]) -> Iterable[npt.NDArray[np.uint8]]:
        import torch

        parts = [self.buffer[start : start + length] for start, length in spans]
        return [torch.cat(parts).cpu().numpy()] if parts else []


def _memory_type(ucp: Ucp, context: int, tensor: Tensor) -> int:
    """UCX's number for the tensor's memory type. Raises TransportError when this libucp, or the
    tensor's allocation, does not let a peer write it."""
    known = {"cpu": MEMORY_HOST, "cuda": MEMORY_CUDA}
    kind = tensor.device.type
    if kind not in known:
        raise TransportError(f"KV on a {kind} device cannot be moved: only on {sorted(known)}")
    found = ContextAttributes(field_mask=4)
    ucp.check(ucp.ucp_context_query(context, byref(found)), "ucp_context_query")
    if not found.memory_types >> known[kind] & 1:
        raise TransportError(
            f"libucp {'.'.join(map(str, ucp.version))} cannot reach {kind} memory here: its {kind} "
            "transports are not installed or did not load (UCX_LOG_LEVEL=debug shows why)"
        )
    if kind == "cuda" and _is_expandable(tensor.data_ptr()):
        raise TransportError(
            "the KV pool lies in an expandable segment, which no other process can map: remove "
            "expandable_segments from PYTORCH_CUDA_ALLOC_CONF"
        )
    return known[kind]


def _is_expandable(address: int) -> bool:
    import torch

    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return any(
        segment["is_expandable"]
        for segment in segments
        if segment["address"] <= address < segment["address"] + segment["total_size"]
    )


def populate(address: int, num_bytes: int) -> None:
    """Populate the page tables of a shared mapping; its content stays.

    Otherwise the first put into each 4 KiB page costs a fault, which halves the first handoffs'
    bandwidth. Kernels before 5.14 refuse, which only costs that time."""
    _libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE)


def _reserve(num_bytes: int) -> int:
    """Reserve a range of addresses."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address: int | None = _libc.mmap(None, num_bytes, 0, flags, -1, 0)
    if address is None or address == _MAP_FAILED:
        raise TransportError(f"cannot reserve {num_bytes} bytes of addresses")
    return address
