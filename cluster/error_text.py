"""An error as one line: in a log, in a pool's status, on an operator's screen."""

from __future__ import annotations

_LONGEST = 600


def one_line(error: BaseException) -> str:
    """The error's type and text, cut short. Ray's run over many lines, the cause among them."""
    text = " ".join(str(error).split())
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
