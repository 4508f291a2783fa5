"""The end of a text that streams, which may be the beginning of a marker."""

from __future__ import annotations


def num_begun(text: str, marker: str) -> int:
    """Count the characters at the end of a text with which the marker may begin."""
    at = text.find(marker[0], max(0, len(text) + 1 - len(marker)))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) - at if at >= 0 else 0
