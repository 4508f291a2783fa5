"""Where the traces of ended requests go: nowhere, or to a collector."""

from __future__ import annotations

from collections.abc import Callable

from baton.errors import ConfigError
from router.report.ended_request import EndedRequest
from router.report.stages import Stages

Trace = Callable[[EndedRequest, str, Stages], str]
"""Traces a request that has ended now, given its `traceparent`. Returns the trace's id; empty: it
is not traced."""


def open_traces(endpoint: str | None, ratio: float) -> Trace:
    """Return what traces requests. Raises ConfigError where OpenTelemetry's SDK is missing."""
    if endpoint is None:
        return lambda *_: ""
    try:
        from router.report.otlp import OtlpTraces
    except ModuleNotFoundError as error:
        raise ConfigError(f"traces need the extra baton-serve[traces]: {error}") from error
    return OtlpTraces(endpoint, ratio).trace
