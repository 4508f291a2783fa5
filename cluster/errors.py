"""The errors of this package, and an error's text as one line.

ReplicaError
  PodLostError
MetadataError
"""

from __future__ import annotations


class ReplicaError(RuntimeError):
    """A replica could not be started."""


class PodLostError(ReplicaError):
    """The pod went away before the ranks were launched in it."""


class MetadataError(RuntimeError):
    """A cloud's metadata service did not answer, or its answer cannot be read."""


_LONGEST = 600


def one_line(error: BaseException) -> str:
    """The error's type and text on one line, at most 600 characters of text."""
    text = " ".join(str(error).split())
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
