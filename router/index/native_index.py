"""The prefix index in C++, with the same methods as its twin in Python."""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections.abc import Collection, Iterable
from ctypes import c_char_p, c_double, c_int64, c_uint64, c_void_p
from pathlib import Path

import numpy as np

from baton.native_build import NativeBuildError, Recipe, build
from kv_transfer.block_hash import HASH_BYTES, BlockHash
from router.index.prefix_index import Hashes, IntArray, PrefixIndex

log = logging.getLogger(__name__)

_NO_PARENT = bytes(HASH_BYTES)
INDEX = Recipe(
    "prefix_index",
    (Path(__file__).with_name("prefix_index.cpp"),),
    ("-O2", "-std=c++17", "-shared", "-fPIC"),
    ("c++", "g++", "clang++"),
)


@functools.cache
def native_library() -> ctypes.PyDLL | None:
    """None where it cannot be built. The first call may compile for a few seconds."""
    try:
        library = ctypes.PyDLL(str(build(INDEX)))  # keeps the GIL: every call is quick
    except (NativeBuildError, OSError) as error:
        log.warning("no native prefix index, using Python's: %s", error)
        return None
    library.baton_index_new.restype = c_void_p
    library.baton_index_fault.restype = c_char_p
    library.baton_index_held.restype = c_int64
    library.baton_index_size.restype = c_uint64
    index, size, text = c_void_p, c_uint64, c_char_p
    for name, arguments in {
        "delete": [index],
        "size": [index],
        "held": [index, size],
        "clear": [index, size],
        "forget": [index, size],
        "fault": [index],
        "store": [index, size, size, text, text, text],
        "remove": [index, size, text, size],
        "predict": [index, text, size, text, size, c_double, c_double, size],
        "lookup": [index, text, size, c_void_p, size],
        "lookup_predicted": [index, text, size, c_void_p, size, c_double],
    }.items():
        getattr(library, f"baton_index_{name}").argtypes = arguments
    for name in ("delete", "clear", "forget", "store", "remove", "predict"):
        getattr(library, f"baton_index_{name}").restype = None
    library.baton_index_lookup.restype = library.baton_index_lookup_predicted.restype = None
    return library


def joined(hashes: Hashes) -> bytes:
    return hashes if isinstance(hashes, bytes) else b"".join(hashes)


class NativePrefixIndex(PrefixIndex):
    """Own the C++ index, in place of the one in Python, which says what the methods do."""

    def __init__(self, library: ctypes.PyDLL, max_predictions: int = 200_000) -> None:
        self._library, self._max_predictions = library, max_predictions
        self._index = library.baton_index_new()
        weakref.finalize(self, library.baton_index_delete, self._index)

    def __len__(self) -> int:
        return int(self._library.baton_index_size(self._index))

    def num_blocks(self, slot: int) -> int:
        return int(self._library.baton_index_held(self._index, slot))

    def store(self, slot: int, parent: BlockHash | None, hashes: Hashes) -> None:
        self.follow(slot, b"", [(parent or b"", joined(hashes))])

    def remove(self, slot: int, hashes: Hashes) -> None:
        packed = joined(hashes)
        self._library.baton_index_remove(self._index, slot, packed, len(packed) // HASH_BYTES)

    def follow(self, slot: int, removed: bytes, stored: Iterable[tuple[bytes, bytes]]) -> None:
        if removed:
            self.remove(slot, removed)
        chains = list(stored)
        if chains:
            parents = b"".join([parent or _NO_PARENT for parent, _ in chains])
            lengths = np.array([len(hashes) for _, hashes in chains], np.uint64) // HASH_BYTES
            hashes = b"".join([hashes for _, hashes in chains])
            arguments = (slot, len(chains), parents, lengths.tobytes(), hashes)
            self._library.baton_index_store(self._index, *arguments)

    def clear(self, slot: int) -> None:
        self._library.baton_index_clear(self._index, slot)

    def forget_predictions(self, slot: int) -> None:
        self._library.baton_index_forget(self._index, slot)

    def predict(
        self, slots: Collection[int], hashes: Hashes, now_s: float, expires_s: float
    ) -> None:
        packed, numbers = joined(hashes), np.array(list(slots), np.int64).tobytes()
        counts = len(packed) // HASH_BYTES, now_s, expires_s, self._max_predictions
        self._library.baton_index_predict(self._index, numbers, len(slots), packed, *counts)

    def lookup(self, hashes: Hashes, num_slots: int) -> IntArray:
        packed, found = joined(hashes), np.zeros(num_slots, np.int64)
        count = len(packed) // HASH_BYTES
        self._library.baton_index_lookup(self._index, packed, count, found.ctypes.data, num_slots)
        return found

    def lookup_predicted(self, hashes: Hashes, num_slots: int, now_s: float) -> IntArray:
        packed, found = joined(hashes), np.zeros(num_slots, np.int64)
        count, at = len(packed) // HASH_BYTES, found.ctypes.data
        self._library.baton_index_lookup_predicted(self._index, packed, count, at, num_slots, now_s)
        return found

    def check_integrity(self) -> None:
        fault = self._library.baton_index_fault(self._index)
        assert fault is None, fault.decode()


def make_index(max_predictions: int) -> PrefixIndex:
    """In C++ where that can be built."""
    library = native_library()
    if library is None:
        return PrefixIndex(max_predictions)
    return NativePrefixIndex(library, max_predictions)
