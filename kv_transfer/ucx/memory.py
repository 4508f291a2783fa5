"""The KV pool as UCX-allocated memory: regions side by side, each registered on its own."""

from __future__ import annotations

import ctypes
import mmap
from ctypes import byref, c_int, c_size_t, c_void_p

import numpy as np
import numpy.typing as npt

from kv_transfer.errors import TransportError
from kv_transfer.lease import Region
from kv_transfer.ucx.binding import MEM_MAP_ALLOCATE, MEM_MAP_FIXED, MemMapParams, Ucp

_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23
_MAP_FAILED = 2**64 - 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, ctypes.c_long]
_libc.munmap.argtypes = [c_void_p, c_size_t]
_libc.madvise.argtypes = [c_void_p, c_size_t, c_int]


class UcxMemory:
    """One reservation of addresses; UCX allocates every region at its own fixed place in it.

    Allocated so, regions are shared-memory segments (System V or POSIX, UCX's choice) that a peer
    on this machine maps and writes directly; memory that is only registered would go through the
    peer's process instead. Every page is touched here: first touch costs several times a put.
    """

    def __init__(
        self, ucp: Ucp, context: int, num_regions: int, region_bytes: int, blocks_per_region: int
    ) -> None:
        self.num_regions = num_regions
        self.region_stride_bytes = -(-region_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.blocks_per_region = blocks_per_region
        self._ucp, self._context = ucp, context
        self._num_bytes = num_regions * self.region_stride_bytes
        self._base = _reserve(self._num_bytes)
        self.handles: tuple[int, ...] = ()
        try:
            for index in range(num_regions):
                self.handles += (self._allocate(index),)
            self.regions = tuple(self._region(index) for index in range(num_regions))
        except TransportError:
            self.free()
            raise
        array = (ctypes.c_uint8 * self._num_bytes).from_address(self._base)
        self.buffer: npt.NDArray[np.uint8] = np.frombuffer(memoryview(array), dtype=np.uint8)
        self.buffer[:: mmap.PAGESIZE] = 0

    def _allocate(self, index: int) -> int:
        handle = c_void_p()
        params = MemMapParams(
            field_mask=1 | 2 | 4,
            address=self._base + index * self.region_stride_bytes,
            length=self.region_stride_bytes,
            flags=MEM_MAP_ALLOCATE | MEM_MAP_FIXED,
        )
        status = self._ucp.ucp_mem_map(self._context, byref(params), byref(handle))
        self._ucp.check(status, f"ucp_mem_map of {self.region_stride_bytes} bytes")
        assert handle.value is not None
        return handle.value

    def _region(self, index: int) -> Region:
        pointer, length = c_void_p(), c_size_t()
        status = self._ucp.ucp_rkey_pack(
            self._context, self.handles[index], byref(pointer), byref(length)
        )
        self._ucp.check(status, "ucp_rkey_pack")
        rkey = ctypes.string_at(pointer.value or 0, length.value)
        self._ucp.ucp_rkey_buffer_release(pointer)
        return Region(
            first_block=index * self.blocks_per_region,
            num_blocks=self.blocks_per_region,
            base_address=self._base + index * self.region_stride_bytes,
            num_bytes=self.region_stride_bytes,
            rkey=rkey,
        )

    def free(self) -> None:
        """Unmap everything; views of `buffer` are void from here on."""
        for handle in self.handles:
            self._ucp.ucp_mem_unmap(self._context, handle)
        self.handles = ()
        _libc.munmap(self._base, self._num_bytes)


def populate(address: int, num_bytes: int) -> None:
    """Make the page tables of a shared mapping now: a put into a page that this process has never
    touched costs a fault each 4 KiB and halves the first handoffs' bandwidth. Content stays. An
    older kernel (before 5.14) refuses, and nothing is lost but the time."""
    _libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE)


def _reserve(num_bytes: int) -> int:
    """A range of addresses that nothing else will take."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address: int | None = _libc.mmap(None, num_bytes, 0, flags, -1, 0)
    if address is None or address == _MAP_FAILED:
        raise TransportError(f"cannot reserve {num_bytes} bytes of addresses")
    return address
