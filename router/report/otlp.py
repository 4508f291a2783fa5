"""Requests' traces, by OTLP to a collector. It needs OpenTelemetry's SDK, whose thread sends them
and drops what a collector does not take."""

from __future__ import annotations

import time

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider, export, sampling
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.report.ended_request import EndedRequest
from router.report.stages import Stage, Stages


class OtlpTraces:
    """Own the exporter. What it still has at the process's exit is sent then."""

    def __init__(self, endpoint: str, ratio: float) -> None:
        sampler = sampling.ParentBased(sampling.TraceIdRatioBased(ratio))
        provider = TracerProvider(sampler, Resource.create({"service.name": "baton-router"}))
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
        provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = provider.get_tracer("baton")

    def trace(self, request: EndedRequest, traceparent: str, stages: Stages) -> str:
        now_s = stages.clock.now_s()
        epoch_ns = time.time_ns() - int(now_s * 1e9)

        def begin(stage: Stage, above: Context, kind: SpanKind = SpanKind.INTERNAL) -> Span:
            fields = {f"baton.{name}": value for name, value in stage.fields.items()}
            began_ns = epoch_ns + int(stage.began_s * 1e9)
            return self._tracer.start_span(stage.name, above, kind, fields, start_time=began_ns)

        caller = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        known = {name: value for name, value in vars(request).items() if value is not None}
        whole = Stage("request", stages.arrived_s, fields=known)
        root = begin(whole, caller, SpanKind.SERVER)
        if not root.is_recording():
            return ""
        spans: dict[Stage | None, Span] = {}
        for stage in stages.all:
            above = set_span_in_context(spans.get(stage.within, root))
            spans[stage] = begin(stage, above)
            spans[stage].end(epoch_ns + int((stage.ended_s or now_s) * 1e9))
        if request.outcome.isupper():  # as errors' reasons are
            root.set_status(StatusCode.ERROR, request.outcome)
        root.end(epoch_ns + int(now_s * 1e9))
        return format_trace_id(root.get_span_context().trace_id)
