"""What Baton's processes agree on beside the messages that they exchange."""

from __future__ import annotations

from baton.v1 import common_pb2

ANY_ATTEMPT = (1 << 32) - 1
"""As a `Cancel`'s attempt: every attempt at the request, whichever router follows it."""

DEADLINE = "deadline"
"""As the `error` of a request that was aborted: its deadline had passed at its worker."""

ORPHANED = "its router is gone"
"""The same of one that no router has followed for `orphan_ttl_s`; whoever attaches runs it on."""

_OF_SAMPLING = frozenset(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def field_on_wire(name: str) -> str:
    """The name that clients give a field of an engine's InvalidRequestError."""
    return f"sampling.{name}" if name in _OF_SAMPLING else name
