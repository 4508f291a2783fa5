"""Two posters of a batch of puts: compiled C, and its twin in Python for where no compiler is."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from ctypes import POINTER, addressof, byref, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Protocol

import numpy as np

from baton.native_build import NativeBuildError, Recipe, build
from kv_transfer.transport import PutBatch
from kv_transfer.ucx.binding import IN_PROGRESS, OP_ATTR_MEMH, RequestParams, Ucp, pointer_status

log = logging.getLogger(__name__)


class PostTarget:
    """Where batches go: libucp handles, in the form that both posters read."""

    def __init__(
        self, worker: int, endpoint: int, memory_handles: Sequence[int], rkeys: Sequence[int]
    ) -> None:
        """`memory_handles` by source region, `rkeys` by target region."""
        self.worker, self.endpoint = worker, endpoint
        self.memory_handles = (c_void_p * len(memory_handles))(*memory_handles)
        self.rkeys = (c_void_p * len(rkeys))(*rkeys)


class Poster(Protocol):
    def post(self, target: PostTarget, batch: PutBatch) -> int:
        """Post all puts of a batch: 0, or the negative status of the one that failed."""


class PythonPoster:
    """The loop in Python: about 1 us a put, with the GIL held between puts."""

    def __init__(self, ucp: Ucp) -> None:
        self._put, self._free = ucp.ucp_put_nbx, ucp.ucp_request_free

    def post(self, target: PostTarget, batch: PutBatch) -> int:
        params = RequestParams(op_attr_mask=OP_ATTR_MEMH)
        runs = batch.runs
        columns = (
            runs.sources + np.uint64(batch.source_offset),
            runs.targets + np.uint64(batch.target_offset),
            runs.lengths,
            runs.source_regions,
            runs.target_regions,
        )
        for source, remote, length, here, there in zip(*(c.tolist() for c in columns), strict=True):
            params.memory_handle = target.memory_handles[here]
            request = self._put(
                target.endpoint, source, length, remote, target.rkeys[there], byref(params)
            )
            status = pointer_status(request)
            if status < 0:
                return status
            if status == IN_PROGRESS:
                self._free(request)
        return 0


class _Api(ctypes.Structure):
    _fields_ = (("put", c_void_p), ("progress", c_void_p), ("release", c_void_p))


class _Batch(ctypes.Structure):
    _fields_ = (
        ("sources", c_void_p),
        ("targets", c_void_p),
        ("lengths", c_void_p),
        ("source_regions", c_void_p),
        ("target_regions", c_void_p),
        ("memory_handles", c_void_p),
        ("rkeys", c_void_p),
        ("source_offset", c_uint64),
        ("target_offset", c_uint64),
    )


class NativePoster:
    """The loop in C, with the GIL released."""

    def __init__(self, ucp: Ucp, library: Path) -> None:
        self._post = ctypes.CDLL(str(library)).baton_post_puts
        self._post.restype = c_int
        self._post.argtypes = [POINTER(_Api), c_void_p, c_void_p, POINTER(_Batch), c_size_t]
        self._api = _Api(
            ucp.address_of("ucp_put_nbx"),
            ucp.address_of("ucp_worker_progress"),
            ucp.address_of("ucp_request_free"),
        )

    def post(self, target: PostTarget, batch: PutBatch) -> int:
        arrays = _Batch(
            *batch.runs.pointers,
            addressof(target.memory_handles),
            addressof(target.rkeys),
            batch.source_offset,
            batch.target_offset,
        )
        status: int = self._post(
            byref(self._api), target.worker, target.endpoint, byref(arrays), len(batch.runs.lengths)
        )
        return status


def make_poster(ucp: Ucp, native: bool) -> Poster:
    """The compiled poster when it is wanted and can be had, else the one in Python."""
    if native:
        try:
            return NativePoster(ucp, compiled(Path(__file__).with_name("post_loop.c")))
        except (NativeBuildError, OSError) as error:
            log.warning("puts are posted from Python, for the C loop cannot be built: %s", error)
    return PythonPoster(ucp)


def compiled(source: Path) -> Path:
    """The library made of one C file. Raises NativeBuildError."""
    flags = ("-O2", "-std=c11", "-shared", "-fPIC")
    return build(Recipe(source.stem, (source,), flags, ("cc", "gcc", "clang")))
