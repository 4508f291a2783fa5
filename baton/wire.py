"""What Baton's processes agree on beside the messages that they exchange."""

from __future__ import annotations

from collections.abc import Mapping

from baton.finish_reason import FinishReason
from baton.fleet import Role, WorkerState
from baton.v1 import common_pb2, control_pb2

ANY_ATTEMPT = (1 << 32) - 1
"""A `Cancel` with this attempt ends every attempt at the request, from any router."""

DEADLINE = "deadline"
"""The `error` of a request that its worker aborted after the deadline."""

ORPHANED = "its router is gone"
"""The `error` of a request that no router followed for `orphan_ttl_s`. A router that attaches runs
it on."""

ROLES = {role: common_pb2.WorkerRole.Value(f"WORKER_ROLE_{role.name}") for role in Role}
ANY_ROLE = common_pb2.WORKER_ROLE_UNSPECIFIED
ROLE_OF = {number: role for role, number in ROLES.items()}
STATES: Mapping[WorkerState, control_pb2.WorkerState.ValueType] = {
    state: control_pb2.WorkerState.Value(f"WORKER_STATE_{state.name}")
    for state in WorkerState
    if state is not WorkerState.UNLISTED
}
STATE_OF = {number: state for state, number in STATES.items()}

_ON_WIRE = {it: common_pb2.FinishReason.Value(f"FINISH_REASON_{it.name}") for it in FinishReason}
_REASONS = {value: reason for reason, value in _ON_WIRE.items()}
_OF_SAMPLING = frozenset(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def field_on_wire(name: str) -> str:
    """Return the name, for clients, of the field in an engine's InvalidRequestError."""
    return f"sampling.{name}" if name in _OF_SAMPLING else name


def finish_reason_on_wire(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    """UNSPECIFIED for None: the request continues."""
    return common_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _ON_WIRE[reason]


def finish_reason_of(reason: common_pb2.FinishReason.ValueType) -> FinishReason | None:
    """None for a request that continues, and for an unknown reason."""
    return _REASONS.get(reason)
