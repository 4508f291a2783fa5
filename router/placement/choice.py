"""The cheapest placement of a prompt: in one native call, or by looking at all of `evaluate`."""

from __future__ import annotations

import ctypes
import functools
import logging
import random
from ctypes import POINTER, byref, c_bool, c_char_p, c_double, c_int64, c_void_p
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from baton.config.router import PlacementConfig
from baton.native_build import NATIVE_FLAG, NativeBuildError, Recipe, build
from router.fleet.fleet_arrays import Bools, FleetArrays
from router.placement.placement import (
    RETRY_PENALTY_S,
    Placement,
    PlacementQuery,
    evaluate,
    placement_at,
    placement_of,
    terms_of,
)

log = logging.getLogger(__name__)

CHOICE = Recipe(
    "choice",
    (Path(__file__).with_name("choice.cpp"),),
    ("-O3", NATIVE_FLAG, "-std=c++17", "-shared", "-fPIC"),
    ("c++", "g++", "clang++"),
)
TIE_TOLERANCE_S = 1e-9
SESSION_TOLERANCE_S = 1e-3  # a session stays on its decode worker if that costs no more than this


def choose(
    query: PlacementQuery,
    fleet: FleetArrays,
    policy: PlacementConfig,
    now_s: float,
    rng: random.Random,
) -> Placement | None:
    """The cheapest placement, ties at random; None when no decode worker has room. A session stays
    on its decode worker if that costs hardly more."""
    library = native_library()
    if library is None:
        return choose_in_python(query, fleet, policy, now_s, rng)
    asked, found = _query(query, fleet, policy, now_s, rng), _Found()
    if not library.baton_cheapest(byref(_columns(fleet)), byref(asked), byref(found)):
        return None
    writer = None if found.prefill_slot < 0 else found.prefill_slot
    costs = (found.cost_s, found.queue_s, found.prefill_s, found.transfer_s, found.decode_s)
    return placement_of(query, fleet, writer, found.decode_slot, costs, now_s)


def choose_in_python(
    query: PlacementQuery,
    fleet: FleetArrays,
    policy: PlacementConfig,
    now_s: float,
    rng: random.Random,
) -> Placement | None:
    """`choose` without a compiler. Looks at every pair, so it is slow for large fleets."""
    terms = terms_of(query, fleet, policy, now_s)
    costs = evaluate(terms, fleet, policy)
    total = costs.min(axis=0)
    least = total.min(initial=np.inf)
    if least == np.inf:
        return None
    stays = (terms.decode_slots == query.preferred) & (total <= least + SESSION_TOLERANCE_S)
    column = _pick(stays if stays.any() else total <= least + TIE_TOLERANCE_S, rng)
    row = _pick(costs[:, column] <= total[column] + TIE_TOLERANCE_S, rng)
    return placement_at(query, fleet, policy, terms, (row, column), now_s)


def _pick(marked: Bools, rng: random.Random) -> int:
    return int(rng.choice(marked.nonzero()[0]))


# --- the native call ------------------------------------------------------------------------------

_COLUMNS = (
    *("kv_class", "can_prefill", "can_decode", "usable", "hold_until_s", "prefill_tokens_per_s"),
    *("prefill_measured_s", "decode_step_s", "decode_measured_s", "handoff_bytes_per_s"),
    *("kv_bytes_per_token", "queued_tokens", "head_tokens", "head_since_s", "running"),
    *("max_running", "free_tokens", "longest_request", "max_held_tokens", "unquarantined_tokens"),
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
        *((name, c_int64) for name in ("least_new_tokens", "preferred", "num_failed")),
        ("cached_tokens", c_void_p),
        ("failed", c_char_p),  # keeps its bytes alive
        ("reserved", c_void_p),
        *((name, c_bool) for name in ("trusts_links", "may_be_local", "must_be_local")),
        *((name, c_double) for name in ("now_s", "measured_since_s", "decode_horizon_tokens")),
        *((name, c_double) for name in ("local_prefill_weight", "handoff_overhead_s")),
        *((name, c_double) for name in ("handoff_overlap", "retry_penalty_s", "tie_tolerance_s")),
        *((name, c_double) for name in ("session_tolerance_s", "decode_draw", "prefill_draw")),
    )


class _Found(ctypes.Structure):
    _fields_ = (
        ("prefill_slot", c_int64),
        ("decode_slot", c_int64),
        *((name, c_double) for name in ("cost_s", "queue_s", "prefill_s")),
        *((name, c_double) for name in ("transfer_s", "decode_s")),
    )


@functools.cache
def native_library() -> ctypes.PyDLL | None:
    """None where it cannot be built. The first call may compile for a few seconds."""
    try:
        library = ctypes.PyDLL(str(build(CHOICE)))  # keeps the GIL: every call is quick
    except (NativeBuildError, OSError) as error:
        log.warning(
            "no native choice of placements, using Python's, which is slow for large fleets: %s",
            error,
        )
        return None
    library.baton_cheapest.argtypes = [POINTER(_Fleet), POINTER(_Query), POINTER(_Found)]
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
    query: PlacementQuery,
    fleet: FleetArrays,
    policy: PlacementConfig,
    now_s: float,
    rng: random.Random,
) -> _Query:
    return _Query(
        query.num_tokens,
        query.max_new_tokens,
        query.kv_class,
        query.least_new_tokens,
        -1 if query.preferred is None else query.preferred,
        len(query.failed),
        query.cached_tokens.ctypes.data,
        np.array(list(query.failed), np.int64).tobytes() if query.failed else None,
        None if query.reserved is None else query.reserved.ctypes.data,
        not query.explores and not fleet.links.are_plain,
        policy.local_prefill != "never",
        policy.local_prefill == "always",
        now_s,
        now_s - policy.trust_rates_s if query.explores else float("-inf"),
        policy.decode_horizon_tokens,
        policy.local_prefill_weight,
        policy.handoff_overhead_s,
        policy.handoff_overlap,
        RETRY_PENALTY_S,
        TIE_TOLERANCE_S,
        SESSION_TOLERANCE_S,
        rng.random(),
        rng.random(),
    )
