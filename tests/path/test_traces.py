"""One request is one trace, as a collector gets it: two pools, and a decode worker that dies."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import logging
import threading
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from baton.config.router import RouterConfig
from baton.config.settings import changed
from baton.v1 import common_pb2, router_pb2, router_pb2_grpc
from engine.run.build import load_model_spec
from router.door.operators.page import seen
from router.door.server import RouterServer
from router.units.units import Units
from tests.cluster.fleet_processes import started
from tests.cluster.whole_cluster import PROMPT, describe
from tests.identities import ROUTER
from tests.router.deployment import byte_model

CALLER, TRACE = "00f067aa0ba902b7", "4b" * 16


class Collector(http.server.BaseHTTPRequestHandler):
    spans: list[Span]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.spans += resource.scope_spans[0].spans if self.path == "/v1/traces" else ()
        self.send_response(200)
        self.end_headers()


@pytest.mark.timeout(180)
async def test_a_request_s_trace_shows_what_ran_where_and_when_over_two_decode_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.report.ended_request")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    spans = Collector.spans = list[Span]()
    byte_model(tmp_path / "m")
    engine = {"backend": "fake", "fake": {"vocab_size": 257, "decode_step_s": 0.02}}
    config, path = describe(tmp_path / "m", engine), tmp_path / "cluster.yaml"
    path.write_text(config.to_yaml())
    async with contextlib.AsyncExitStack() as stack:
        collector = stack.enter_context(http.server.HTTPServer(("127.0.0.1", 0), Collector))
        threading.Thread(target=collector.serve_forever).start()
        stack.callback(collector.shutdown)
        fleet = await stack.enter_async_context(started(path))
        traces_to = f"http://127.0.0.1:{collector.server_port}/"
        routing = changed(
            RouterConfig(),
            http={"port": None},
            placement={"local_prefill": "never"},
            traces={"endpoint": traces_to},
        )
        server = RouterServer(Units(routing, fleet.control, ("m",), ROUTER), routing, "127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0.0)
        router = await server.units.main_router()
        async with asyncio.timeout(60):
            while sum(entry.usable for entry in router.fleet) < 4:  # noqa: ASYNC110  no event
                await asyncio.sleep(0.05)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address))
        request = router_pb2.GenerateRequest(
            token_ids=router_pb2.TokenIds(ids=PROMPT),
            sampling=common_pb2.SamplingParams(max_tokens=60, ignore_eos=True),
        )
        decode, num_tokens, metadata = [], 0, (("traceparent", f"00-{TRACE}-{CALLER}-01"),)
        asking = router_pb2_grpc.RouterServiceStub(channel).Generate(request, metadata=metadata)
        async for event in asking:
            decode += [event.routed.decode_worker] if event.HasField("routed") else []
            num_tokens += len(event.tokens.ids)
            if num_tokens > 2 and fleet.processes[decode[0]].returncode is None:
                await fleet.kill(decode[0])
        async with asyncio.timeout(20):
            while not any(span.name == "request" for span in spans):  # noqa: ASYNC110  no event
                await asyncio.sleep(0.02)
        shown = [each["trace_id"] for each in seen(server.units)["units"][0]["requests"]]
    lines = [vars(each)["fields"] for each in caplog.records if each.msg == "request"]
    assert [line["trace_id"] for line in lines] == shown == [TRACE]
    assert {span.trace_id.hex() for span in spans} == {TRACE}

    spans.sort(key=lambda span: span.start_time_unix_nano)
    by_id = {span.span_id: span for span in spans}
    [root] = [span for span in spans if span.parent_span_id.hex() == CALLER]
    below: dict[str, list[str]] = {}
    for span in [each for each in spans if each is not root]:
        parent = by_id[span.parent_span_id]
        assert parent.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= parent.end_time_unix_nano
        below.setdefault(parent.name, []).append(span.name)
    assert below["migration"] == ["queue", "reserve", "prefill"]
    assert below["prefill"][:9] == ["worker queue", *["chunk"] * 8]
    assert below["request"][:3] == ["tokenize", "queue", "reserve"]
    ends = ["decode", "decode", "handoff", "handoff", "migration", "prefill"]
    assert sorted(below["request"][3:]) == ends

    def all_of(name: str, field: str) -> list[Any]:
        fields = [each for span in spans if span.name == name for each in span.attributes]
        values = [each.value for each in fields if each.key == f"baton.{field}"]
        return [getattr(value, str(value.WhichOneof("value"))) for value in values]

    token_bytes = load_model_spec("", config.engine).layout.token_bytes()
    assert all_of("handoff", "num_bytes")[0] == len(PROMPT) * token_bytes
    assert all_of("handoff", "link")[0] == f"{all_of('prefill', 'worker')[0]} -> {decode[0]}"
    assert all_of("handoff", "bytes_per_s")[0] > 0
    assert sum(all_of("chunk", "num_tokens")[:8]) == len(PROMPT)
    assert all_of("decode", "worker") == decode
