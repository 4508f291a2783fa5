"""What a router and a decode worker agree on beside the messages of their session."""

from __future__ import annotations

ANY_ATTEMPT = (1 << 32) - 1
"""As a `Cancel`'s attempt: every attempt at the request, whichever router follows it."""

DEADLINE = "deadline"
"""As the `error` of a request that was aborted: its deadline had passed at its worker."""

ORPHANED = "its router is gone"
"""The same of one that no router has followed for `orphan_ttl_s`; whoever attaches runs it on."""
