"""The line that a request leaves in the log at its end: ids, workers, outcome and times as fields.
It holds names, but nothing else that the client wrote, and nothing of the answer."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from baton.v1 import router_pb2

log = logging.getLogger(__name__)

MET, MISSED = "met", "missed"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_MAX_CHARS = 128  # longer names are refused, and this line reports the refusal


@dataclass(frozen=True)
class RequestLine:
    """What is not known, or did not happen, is None or empty, and left out of the line."""

    request_id: str
    tenant: str
    outcome: str
    """A `FinishReason`'s value, or the reason of the error that it ended with."""
    e2e_ms: float
    session_id: str = ""
    trace_id: str = ""
    prefill_worker: str = ""
    """Of the newest attempt, as decode worker and lease; none where the decode worker prefills."""
    decode_worker: str = ""
    lease_id: str = ""
    num_attempts: int = 0
    """At this router."""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    queue_ms: float | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    ttft_target: str = ""
    """`MET` or `MISSED`."""
    itl_target: str = ""

    def write(self) -> None:
        if log.isEnabledFor(logging.INFO):
            known = {name: _short(value) for name, value in vars(self).items() if _is_known(value)}
            log.info("request", extra={"fields": known})


def of_refused(
    request: router_pb2.GenerateRequest, drawn_id: str, outcome: str, e2e_s: float
) -> RequestLine:
    """The line of a request that never ran. Its client may have named it anything."""
    return RequestLine(
        request_id=request.request_id or drawn_id,
        tenant=request.tenant,
        outcome=outcome,
        e2e_ms=e2e_s * 1e3,
        session_id=request.session_id,
        trace_id=trace_id(request.traceparent),
    )


def judged(target_s: float | None, took_s: float, *, is_over: bool) -> str:
    """Whether a time met its target. `is_over`: the time is final. Empty: no target was named, or
    it ended before that was known."""
    if target_s is None or (took_s <= target_s and not is_over):
        return ""
    return MET if took_s <= target_s else MISSED


def trace_id(traceparent: str) -> str:
    """Of a W3C traceparent; empty where it is none."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return "" if found is None else found["trace"]


def _is_known(value: str | float | None) -> bool:
    return value is not None and value != ""


def _short(value: str | float) -> str | float:
    """Times to the microsecond."""
    if isinstance(value, str):
        return value[:_MAX_CHARS]
    return round(value, 3)
