"""What both roles' services share of the wire: engine values as messages, and the other way."""

from __future__ import annotations

from collections.abc import Callable

from baton.v1 import common_pb2, worker_pb2
from engine.request import FinishReason, RequestSpec

ReadSpec = Callable[[worker_pb2.RequestSpec], RequestSpec]
"""Makes the engine's request of a message, under an id unique to its attempt.

Raises baton.errors.InvalidRequestError, which names the field.
"""

_OF_SAMPLING = frozenset(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)

_FINISHED = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: common_pb2.FINISH_REASON_ABORTED,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}


def finish_reason_to_proto(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    """None, for a request that goes on, is UNSPECIFIED."""
    return _FINISHED[reason]


def finish_reason_from_proto(reason: common_pb2.FinishReason.ValueType) -> FinishReason | None:
    """None for a request that goes on, and for a reason that is not known here."""
    return {wire: own for own, wire in _FINISHED.items()}.get(reason)


def field_on_wire(name: str) -> str:
    """Of a field that an engine's InvalidRequestError names, as RequestSpec and clients call it."""
    return f"sampling.{name}" if name in _OF_SAMPLING else name
