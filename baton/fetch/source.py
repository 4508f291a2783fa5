"""Where a checkpoint's files come from: a folder of which single files can be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

TIMEOUT_S = 60.0
"""What nothing comes for so long is cut off."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Content:
    """A file on its way."""

    chunks: Iterator[bytes]
    """Raises CutOffError; may also end early."""
    start: int
    """How many bytes of its beginning are left out."""
    size: int | None
    """Of the whole file, in bytes; None: the source does not say, and ends only when all came."""
    version: str | None
    """What to ask for when it is gone on with; None: the source cannot tell its versions apart."""
    sha256: str | None = None
    """Of the whole file, in hexadecimal digits, where the source says it."""


class Source(Protocol):
    """A folder's files, by name."""

    def where(self, name: str) -> str:
        """For messages; without secrets."""

    def names(self) -> frozenset[str] | None:
        """Of all its files; None: it cannot be listed. Raises FetchError."""

    def read(
        self, name: str, start: int = 0, version: str | None = None
    ) -> AbstractContextManager[Content]:
        """A file from byte `start` on while it is still this `version`, else from its beginning.

        Raises NotThereError, ForbiddenError, CutOffError, FetchError.
        """
