"""How a request ends."""

from __future__ import annotations

import enum


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"
    """A worker failed it; a router tries it again elsewhere."""
    TOOL_CALLS = "tool_calls"
    """Only clients see this: the answer stopped after calls of tools."""
