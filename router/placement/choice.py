"""The cheapest placements of a prompt: terms by worker in Python, pairs in C++ (`choice.cpp`)."""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_bool, c_double, c_int64, c_void_p
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from baton.native_build import NATIVE_FLAG, Recipe, load
from router.fleet.fleet_arrays import FleetArrays, Floats
from router.placement.placement import Placement, PlacementQuery
from router.placement.terms import TERMS, At

CHOICE = Recipe(
    "choice",
    (Path(__file__).with_suffix(".cpp"),),
    ("-O3", NATIVE_FLAG, "-std=c++17", "-shared", "-fPIC"),
    ("c++", "g++", "clang++"),
)
TIE_TOLERANCE_S = 1e-9
_NUM_SUMS = len(At) + 1  # the last: the prefill itself, behind which a part of a transfer hides


def choose(query: PlacementQuery, fleet: FleetArrays, rng: random.Random) -> Placement | None:
    """Return the cheapest placement, ties at random; None when no decode worker has room."""
    costs, sums = _costs(query, fleet)
    found = _Found()
    asked = _query(query, fleet, sums, rng.random(), rng.random())
    if not native_library().baton_cheapest(byref(_columns(fleet)), byref(asked), byref(found)):
        return None
    return _placement(query, fleet, costs, found)


def ranked(query: PlacementQuery, fleet: FleetArrays, limit: int) -> Sequence[Placement]:
    """Return the candidates, cheapest first, at most `limit`."""
    costs, sums = _costs(query, fleet)
    found = (_Found * limit)()
    asked = _query(query, fleet, sums, 0.0, 0.0)
    count = native_library().baton_ranked(byref(_columns(fleet)), byref(asked), found, limit)
    return [_placement(query, fleet, costs, each) for each in found[:count]]


def trusted_speeds(fleet: FleetArrays, kv_class: int, since_s: float) -> tuple[Floats, Floats]:
    """Return (prefill tokens/s, seconds a decode step) [slots] to reckon with.

    A worker that was not measured since then counts as the best of its class. Else a worker that
    looks slow is never chosen, and so never measured again.
    """
    both = np.empty((2, len(fleet.names)))
    rates = both.ctypes.data
    steps = rates + both.strides[0]
    native_library().baton_speeds(byref(_columns(fleet)), kv_class, since_s, rates, steps)
    return both[0], both[1]


def _costs(query: PlacementQuery, fleet: FleetArrays) -> tuple[Mapping[str, Floats], Floats]:
    """Return the terms by name, and their sums [by `At`, slots]."""
    costs: dict[str, Floats] = {}
    sums = np.zeros((_NUM_SUMS, len(fleet.names)))
    rows = list(sums)
    for name, term in TERMS.items():
        seconds = term.of(fleet, query)
        if seconds is not None:
            costs[name] = seconds
            row = rows[term.AT]
            row += seconds
    rows[-1][:] = query.prefill_s
    return costs, sums


def _placement(
    query: PlacementQuery, fleet: FleetArrays, costs: Mapping[str, Floats], found: _Found
) -> Placement:
    decode: int = found.decode_slot
    is_local = found.prefill_slot < 0
    prefill: int = decode if is_local else found.prefill_slot
    itself = (decode,) if found.counts_itself else ()
    slots = ((prefill,), (decode,), itself, {prefill, decode})  # by `At`
    terms_s = {
        name: sum(float(seconds[slot]) for slot in slots[TERMS[name].AT])
        for name, seconds in costs.items()
    }
    if not is_local:
        terms_s["transfer"] = found.transfer_s
    cached = query.cached_tokens
    uncached = max(1, query.num_tokens - int(cached[prefill]))
    return Placement(
        None if is_local else prefill,
        decode,
        "" if is_local else fleet.names[prefill],
        fleet.names[decode],
        found.cost_s,
        terms_s,
        num_cached_tokens_prefill=0 if is_local else int(cached[prefill]),
        num_cached_tokens_decode=int(cached[decode]),
        num_tokens=query.num_tokens,
        num_tokens_ahead=terms_s["queue"] * float(query.tokens_per_s[prefill]) + uncached,
    )


# --- the native calls -----------------------------------------------------------------------------

_COLUMNS = (
    *("kv_class", "can_prefill", "can_decode", "usable", "hold_until_s", "prefill_tokens_per_s"),
    *("prefill_measured_s", "decode_step_s", "decode_measured_s", "handoff_bytes_per_s"),
    *("kv_bytes_per_token", "running", "max_running", "free_tokens", "longest_request"),
    *("max_held_tokens", "unquarantined_tokens"),
)


class _Fleet(ctypes.Structure):
    _fields_ = (
        ("num_slots", c_int64),
        *((name, c_void_p) for name in _COLUMNS),
        ("link_slowness", c_void_p),
    )


class _Query(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "max_new_tokens", "kv_class")),
        ("least_new_tokens", c_int64),
        *((name, c_void_p) for name in ("cached_tokens", "reserved", "sums_s")),
        *((name, c_bool) for name in ("trusts_links", "may_be_local", "must_be_local")),
        *((name, c_double) for name in ("now_s", "tie_tolerance_s", "decode_draw", "prefill_draw")),
    )


class _Found(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("prefill_slot", "decode_slot")),
        *((name, c_double) for name in ("cost_s", "transfer_s")),
        ("counts_itself", c_bool),
    )


@functools.cache
def native_library() -> ctypes.PyDLL:
    """Load the choice's code; the first call may compile it for a few seconds. Raises
    NativeBuildError."""
    library, fleet, query = load(CHOICE), POINTER(_Fleet), POINTER(_Query)
    library.baton_cheapest.argtypes = [fleet, query, POINTER(_Found)]
    library.baton_ranked.argtypes = [fleet, query, POINTER(_Found), c_int64]
    library.baton_ranked.restype = c_int64
    library.baton_speeds.argtypes = [fleet, c_int64, c_double, c_void_p, c_void_p]
    library.baton_speeds.restype = None
    return library


_fleets: WeakKeyDictionary[FleetArrays, _Fleet] = WeakKeyDictionary()


def _columns(fleet: FleetArrays) -> _Fleet:
    """Addresses of its columns, which stay where they are."""
    columns = _fleets.get(fleet)
    if columns is None:
        addresses = (getattr(fleet, name).ctypes.data for name in _COLUMNS)
        slowness = fleet.links.slowness.ctypes.data
        columns = _fleets[fleet] = _Fleet(len(fleet.names), *addresses, slowness)
    return columns


def _query(
    query: PlacementQuery, fleet: FleetArrays, sums: Floats, decode_draw: float, prefill_draw: float
) -> _Query:
    policy = query.policy
    return _Query(
        query.num_tokens,
        query.max_new_tokens,
        query.kv_class,
        query.least_new_tokens,
        query.cached_tokens.ctypes.data,
        None if query.reserved is None else query.reserved.ctypes.data,
        sums.ctypes.data,
        not query.explores and not fleet.links.are_plain,
        policy.local_prefill != "never",
        policy.local_prefill == "always",
        query.now_s,
        TIE_TOLERANCE_S,
        decode_draw,
        prefill_draw,
    )
