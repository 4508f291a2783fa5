"""Memory in huge pages where the system gives them, for what every step reads."""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch

_HUGE_BYTES = 2 << 20
_CHUNK_BYTES = 32 << 20
_ALIGNED_BYTES = 4096
_lock = threading.Lock()
_chunk: torch.Tensor = torch.empty(0, dtype=torch.uint8)  # what is left of the newest one


def take(num_bytes: int) -> torch.Tensor:
    """Take zeros, uint8 [num_bytes], that begin at a page. The tensor and its views keep them
    alive, with up to 32 MiB around them."""
    global _chunk
    size = -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    with _lock:  # engines of one process may load at the same time
        if size > len(_chunk):
            chunk = _map(max(size, _CHUNK_BYTES))
            if size >= _CHUNK_BYTES:
                return chunk[:num_bytes]
            _chunk = chunk
        taken, _chunk = _chunk[:num_bytes], _chunk[size:]
    return taken


def _map(num_bytes: int) -> torch.Tensor:
    size = -(-num_bytes // _HUGE_BYTES) * _HUGE_BYTES + _HUGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: small pages do
            memory.madvise(mmap.MADV_HUGEPAGE)
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    start = -mapped.data_ptr() % _HUGE_BYTES
    return mapped[start : start + num_bytes]
