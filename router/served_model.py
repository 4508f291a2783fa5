"""The model that a router serves for its life: its tokenizer is that model's."""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import NotResumableError
from router.text import TextModel


def not_resumable() -> NotResumableError:
    return NotResumableError(
        "the model that the request's tokens come from is not served any more;"
        " ask anew under a new id"
    )


@dataclass(frozen=True)
class ServedModel:
    name: str
    """What clients call it."""
    text: TextModel
    fingerprint: bytes = b""
    """Of weights and configuration. Empty: the worker that sent its tokenizer has none."""
    code: str = ""
    """Of the unit that serves it."""

    @property
    def unit(self) -> str:
        """As Routed names it; empty: the fingerprint is not known."""
        return f"{self.code}/{self.fingerprint.hex()[:16]}" if self.fingerprint else ""
