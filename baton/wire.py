"""What Baton's processes agree on beside the messages that they exchange."""

from __future__ import annotations

from baton.v1 import common_pb2

ANY_ATTEMPT = (1 << 32) - 1
"""A `Cancel` with this attempt ends every attempt at the request, from any router."""

DEADLINE = "deadline"
"""The `error` of a request that its worker aborted after the deadline."""

ORPHANED = "its router is gone"
"""The `error` of a request that no router followed for `orphan_ttl_s`. A router that attaches runs
it on."""

_OF_SAMPLING = frozenset(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def field_on_wire(name: str) -> str:
    """Return the name, for clients, of the field in an engine's InvalidRequestError."""
    return f"sampling.{name}" if name in _OF_SAMPLING else name
