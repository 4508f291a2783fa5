"""A request at its end, as its line in the log, the operators' page, its trace and metrics show it.
It holds names, but nothing else that the client wrote, and nothing of the answer."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

log = logging.getLogger(__name__)

MET, MISSED = "met", "missed"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_MAX_CHARS = 128  # longer names are refused, and a line reports the refusal
_IN_LINE = (
    *("request_id", "tenant", "outcome", "e2e_s", "session_id", "trace_id", "prefill_worker"),
    *("decode_worker", "lease_id", "num_attempts", "num_prompt_tokens", "num_cached_tokens"),
    *("num_output_tokens", "queue_s", "ttft_s", "itl_s", "ttft_target", "itl_target"),
)


@dataclass(frozen=True)
class EndedRequest:
    """Times are in seconds; 0 where a stage did not happen. What is not known is None or empty."""

    request_id: str
    tenant: str
    outcome: str
    """A `FinishReason`'s value, or the reason of the error that it ended with."""
    e2e_s: float
    session_id: str = ""
    trace_id: str = ""
    reason: str = ""
    """Why it was placed where it ran."""
    prefill_worker: str = ""
    """The newest attempt's, as decode worker and lease are; empty where that prefills itself."""
    decode_worker: str = ""
    lease_id: str = ""
    num_attempts: int = 0
    """Of this router alone."""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    reserve_s: float = 0.0
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    second_token_s: float = 0.0
    """From the first token to the second."""
    decode_s: float = 0.0
    """From the first token to the last."""
    tpot_s: float = 0.0
    """The mean gap between tokens."""
    ttft_s: float = 0.0
    itl_s: float = 0.0
    """The median gap between tokens."""
    ttft_target: str = ""
    """`MET`, `MISSED` or empty (see `judged`)."""
    itl_target: str = ""

    def write_line(self) -> None:
        """Write what is known to the log, times in milliseconds."""
        if log.isEnabledFor(logging.INFO):
            fields: dict[str, str | float] = {}
            for name in _IN_LINE:
                value = getattr(self, name)
                if isinstance(value, float) and value:
                    fields[f"{name.removesuffix('_s')}_ms"] = round(value * 1e3, 3)
                elif isinstance(value, int) or (isinstance(value, str) and value):
                    fields[name] = value if isinstance(value, int) else value[:_MAX_CHARS]
            log.info("request", extra={"fields": fields})


def judged(target_s: float | None, took_s: float, *, is_over: bool) -> str:
    """Say whether a time met its target. `is_over`: the time is final. Empty: no target was named,
    or the request ended before that was known."""
    if target_s is None or (took_s <= target_s and not is_over):
        return ""
    return MET if took_s <= target_s else MISSED


def trace_id(traceparent: str) -> str:
    """Return the trace id of a W3C traceparent; empty where it is none."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return "" if found is None else found["trace"]
