"""Which worker holds which leading blocks of a prompt.

The index is C++ (`prefix_index.cpp`). Every worker has a bit. Per block the index keeps two masks:
who *holds* it and for whom it is *reachable*, that is, held with all its ancestors. A reachable
block's parent is reachable too: so the number of leading blocks a worker holds is found by binary
search, for all workers at once.

Predictions (blocks that a placed prompt is about to leave) are kept apart: they expire, and never
mix with what workers have reported. A chain is predicted from its start, so no block is believed
longer than its ancestors, and the same search finds where a worker's prediction ends.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Collection, Iterable
from ctypes import c_char_p, c_double, c_int64, c_uint64, c_void_p
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.native_build import Recipe, load
from kv_transfer.block_hash import HASH_BYTES

_NO_PARENT = bytes(HASH_BYTES)
INDEX = Recipe(
    "prefix_index",
    (Path(__file__).with_suffix(".cpp"),),
    ("-O2", "-std=c++17", "-shared", "-fPIC"),
    ("c++", "g++", "clang++"),
)


@functools.cache
def native_library() -> ctypes.PyDLL:
    """Load the index's code; the first call may compile it for a few seconds. Raises
    NativeBuildError."""
    library = load(INDEX)
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
        "lookup": [index, text, size, c_void_p, size, c_double],
    }.items():
        getattr(library, f"baton_index_{name}").argtypes = arguments
    for name in ("delete", "clear", "forget", "store", "remove", "predict", "lookup"):
        getattr(library, f"baton_index_{name}").restype = None
    return library


class PrefixIndex:
    """Own the map from block hash to the workers that hold it. Workers are slots 0, 1, ...

    A chain of hashes is concatenated, parents first.
    """

    def __init__(self, max_predictions: int = 200_000) -> None:
        self._library, self._max_predictions = native_library(), max_predictions
        self._index = self._library.baton_index_new()
        weakref.finalize(self, self._library.baton_index_delete, self._index)

    def __len__(self) -> int:
        return int(self._library.baton_index_size(self._index))

    def num_blocks(self, slot: int) -> int:
        """Count the blocks that the worker holds, reachable or not."""
        return int(self._library.baton_index_held(self._index, slot))

    # --- what workers report -------------------------------------------------------------------

    def follow(self, slot: int, removed: bytes, stored: Iterable[tuple[bytes, bytes]]) -> None:
        """Take in one message of a worker: blocks removed, which puts their descendants out of its
        reach; then chains stored, each with its parent (empty: none)."""
        if removed:
            self._library.baton_index_remove(self._index, slot, removed, len(removed) // HASH_BYTES)
        chains = list(stored)
        if chains:
            parents = b"".join([parent or _NO_PARENT for parent, _ in chains])
            lengths = np.array([len(hashes) for _, hashes in chains], np.uint64) // HASH_BYTES
            hashes = b"".join([hashes for _, hashes in chains])
            arguments = (slot, len(chains), parents, lengths.tobytes(), hashes)
            self._library.baton_index_store(self._index, *arguments)

    def clear(self, slot: int) -> None:
        """Forget everything about a worker: it is gone, or a snapshot replaces what was known."""
        self._library.baton_index_clear(self._index, slot)

    # --- predictions ---------------------------------------------------------------------------

    def predict(
        self, slots: Collection[int], hashes: bytes, now_s: float, expires_s: float
    ) -> None:
        """Each of these workers will soon hold this chain from a prompt's start; believed until
        expiry."""
        numbers = np.array(list(slots), np.int64).tobytes()
        counts = len(hashes) // HASH_BYTES, now_s, expires_s, self._max_predictions
        self._library.baton_index_predict(self._index, numbers, len(slots), hashes, *counts)

    def forget_predictions(self, slot: int) -> None:
        self._library.baton_index_forget(self._index, slot)

    # --- lookup --------------------------------------------------------------------------------

    def lookup(self, hashes: bytes, num_slots: int, now_s: float) -> npt.NDArray[np.int64]:
        """Count the leading blocks of a chain that each worker holds or is predicted to hold, int64
        [num_slots]. No prediction lasts until infinity."""
        found = np.zeros(num_slots, np.int64)
        count, at = len(hashes) // HASH_BYTES, found.ctypes.data
        self._library.baton_index_lookup(self._index, hashes, count, at, num_slots, now_s)
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError when masks, counts and links disagree."""
        fault = self._library.baton_index_fault(self._index)
        assert fault is None, fault.decode()
