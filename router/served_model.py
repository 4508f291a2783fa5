"""Which model this router serves: one for its life, since its tokenizer is that model's.

A registry refuses workers of another model than its first worker's. If it reports another model
than before, another unit has taken the old one's place:

1. Streams that have put out tokens end as NOT_RESUMABLE.
2. The router drops its workers and takes no others. It drains and ends; whoever starts it again has
   it read the new model's tokenizer.
3. A client names the model that its tokens come from when it comes back (`Routed`), so that no
   router goes on with them on another model.
"""

from __future__ import annotations

from baton.errors import NotResumableError


def not_resumable() -> NotResumableError:
    return NotResumableError(
        "the model that the request's tokens come from is not served any more;"
        " ask anew under a new id"
    )


class ServedModel:
    """Own the fingerprint of the model that this router serves."""

    def __init__(self) -> None:
        self.fingerprint = b""
        """Empty: no worker has registered yet."""

    def is_replaced_by(self, fingerprint: bytes) -> bool:
        """Whether the registry reports another model. The first one that it reports is served."""
        self.fingerprint = self.fingerprint or fingerprint
        return fingerprint not in (b"", self.fingerprint)

    def check_same(self, fingerprint: bytes) -> None:
        """Raise NotResumableError for tokens of another model. `fingerprint`: as the client brings
        it; empty: it brings none."""
        if fingerprint and self.fingerprint and fingerprint != self.fingerprint:
            raise not_resumable()
