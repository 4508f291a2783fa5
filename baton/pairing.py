"""Which workers of a fleet can exchange KV with no other.

That is no error: while weights or settings are rolled out, a fleet has two kinds of workers. But
one that stays alone serves at most what it can prefill and decode by itself, so it is told of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from baton.v1 import common_pb2, control_pb2

_PREFILL, _DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE
_PARTNERS = {_PREFILL: "decode worker", _DECODE: "prefill worker"}
_NAMED = 3


def unpaired(fleet: control_pb2.WatchFleetResponse) -> dict[str, str]:
    """What to say of each live worker whose partners all run other weights or settings, by its id.

    Partners are the workers that are not gone and take on the other half of a request.
    """
    here = [
        worker.info for worker in fleet.workers if worker.state != control_pb2.WORKER_STATE_GONE
    ]
    of_kind: dict[bytes, list[control_pb2.WorkerInfo]] = defaultdict(list)
    for info in here:
        of_kind[info.kv_fingerprint].append(info)
    if len(of_kind) < 2:
        return {}
    told = {}
    for worker in fleet.workers:
        mine, name = worker.info, worker.info.ref.worker_id
        if worker.state != control_pb2.WORKER_STATE_LIVE:
            continue
        if any(_are_partners(mine, other) for other in of_kind[mine.kv_fingerprint]):
            continue
        others = [other for other in here if _are_partners(mine, other)]
        if others:
            told[name] = f"{name} {_difference(mine, others)}"
    return told


def _difference(mine: control_pb2.WorkerInfo, others: Sequence[control_pb2.WorkerInfo]) -> str:
    names = _listed([other.ref.worker_id for other in others])
    partners = f"every {_PARTNERS.get(mine.role, 'other worker')} ({names})"
    if mine.dtype and all(other.dtype not in ("", mine.dtype) for other in others):
        return (
            f"computes in {mine.dtype}, unlike {partners}: it pairs with none; "
            "engine.dtype names one for all"
        )
    return f"runs other weights or settings than {partners}: it pairs with none"


def _are_partners(one: control_pb2.WorkerInfo, other: control_pb2.WorkerInfo) -> bool:
    """Whether one may prefill what the other decodes, as far as their roles go."""
    if one.ref.worker_id == other.ref.worker_id:
        return False
    return one.role != other.role or one.role not in (_PREFILL, _DECODE)


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
