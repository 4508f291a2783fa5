"""Which workers of a fleet can exchange KV with no other worker.

All workers of a cluster run one model, but pools may set another dtype or block size. A worker
without partners serves only what it can prefill and decode itself, so `baton status` names it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from baton.fleet import Role, WorkerState
from baton.v1 import control_pb2
from baton.wire import ROLES, STATES

_PREFILL, _DECODE = ROLES[Role.PREFILL], ROLES[Role.DECODE]
_PARTNERS = {_PREFILL: "decode worker", _DECODE: "prefill worker"}
_NAMED = 3


def unpaired(fleet: control_pb2.WatchFleetResponse) -> dict[str, str]:
    """Worker id -> message, for each live worker whose KV fingerprint no partner shares.

    Partners are workers that are not gone and can run the other half of a request.
    """
    here = [worker.info for worker in fleet.workers if worker.state != STATES[WorkerState.GONE]]
    of_kind: dict[bytes, list[control_pb2.WorkerInfo]] = defaultdict(list)
    for info in here:
        of_kind[info.kv_fingerprint].append(info)
    if len(of_kind) < 2:
        return {}
    messages = {}
    for worker in fleet.workers:
        mine, name = worker.info, worker.info.ref.worker_id
        if worker.state != STATES[WorkerState.LIVE]:
            continue
        if any(_are_partners(mine, other) for other in of_kind[mine.kv_fingerprint]):
            continue
        others = [other for other in here if _are_partners(mine, other)]
        if others:
            messages[name] = f"{name} {_difference(mine, others)}"
    return messages


def _difference(mine: control_pb2.WorkerInfo, others: Sequence[control_pb2.WorkerInfo]) -> str:
    names = _listed([other.ref.worker_id for other in others])
    partners = f"every {_PARTNERS.get(mine.role, 'other worker')} ({names})"
    if mine.dtype and all(other.dtype not in ("", mine.dtype) for other in others):
        return (
            f"computes in {mine.dtype}, unlike {partners}: it pairs with none; "
            "set one engine.dtype for all"
        )
    return (
        f"has another KV fingerprint than {partners}: it pairs with none; engine.dtype and "
        "engine.block_size must be the same in all pools"
    )


def _are_partners(one: control_pb2.WorkerInfo, other: control_pb2.WorkerInfo) -> bool:
    """Whether their roles let one prefill what the other decodes."""
    if one.ref.worker_id == other.ref.worker_id:
        return False
    return one.role != other.role or one.role not in (_PREFILL, _DECODE)


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
