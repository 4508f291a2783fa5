"""Every request leaves one line in the router's log, and its targets are judged."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc.aio
import pytest

from baton.clock import ManualClock
from baton.errors import BatonError
from baton.finish_reason import FinishReason
from baton.v1 import router_pb2
from router.report.ended_request import judged, trace_id
from router.units.router import Router
from tests.router.answers import PROMPT, ask_for, error_of
from tests.router.deployment import deployment
from tests.router.request_outputs import output_for

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture(autouse=True)
def log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.report.ended_request")


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    records = [each for each in caplog.records if each.name == "router.report.ended_request"]
    return [dict(each.fields) for each in records]  # type: ignore[attr-defined]


async def test_a_request_s_line_shows_where_it_ran_and_how_it_went_but_nothing_that_was_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with deployment() as d:
        asked = ask_for(
            PROMPT,
            request_id="mine",
            tenant="ours",
            session_id="talk-7",
            traceparent=PARENT,
            ttft_target_ms=20_000,
            itl_target_ms=20_000,
        )
        answer = await d.client.ask(asked)
        await d.client.ask(asked)  # what is remembered is no request
        await d.check_empty()
    [line] = lines(caplog)
    times = {name: line.pop(name) for name in list(line) if name.endswith("_ms")}
    assert line == {
        "request_id": "mine",
        "tenant": "ours",
        "outcome": "length",
        "session_id": "talk-7",
        "trace_id": TRACE,
        "prefill_worker": "p0",
        "decode_worker": "d0",
        "lease_id": line["lease_id"],
        "num_attempts": 1,
        "num_prompt_tokens": len(PROMPT),
        "num_cached_tokens": 0,
        "num_output_tokens": len(answer.ids),
        "ttft_target": "met",
        "itl_target": "met",
    }
    assert line["lease_id"]
    assert answer.finished is not None
    for name, reported in times.items():
        assert reported == pytest.approx(getattr(answer.finished.timings, name), abs=1e-3)
    assert set(times) == {"e2e_ms", "queue_ms", "ttft_ms", "itl_ms"}
    assert not [r for r in caplog.records if PROMPT in r.getMessage()]
    assert not [r for r in caplog.records if answer.text in r.getMessage()]


async def test_a_request_that_is_tried_again_has_one_line_with_the_workers_that_ended_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with deployment(prefill=2) as d:
        for worker_id in ("p0", "p1"):
            d.worker(worker_id).faults.fail_prefills = 1
        answer = await d.client.ask(ask_for(PROMPT))
    [line] = lines(caplog)
    assert line["outcome"] == "length"
    assert line["num_attempts"] == 3
    assert line["prefill_worker"] == answer.routed[-1].prefill_worker
    assert line["request_id"] == answer.routed[-1].request_id


async def test_what_is_refused_or_aborted_has_its_line_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with deployment() as d:
        for wrong in (
            ask_for(PROMPT, request_id="unknown", model="another"),
            ask_for(PROMPT, request_id="secret words"),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await d.client.ask(wrong)
        d.worker("d0").may_decode.clear()
        running = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id="stopped")))
        await d.until(lambda: bool(d.worker("d0").runs))
        await d.client.stub.Abort(router_pb2.AbortRequest(request_id="stopped"))
        await running
    ends = [(line["request_id"], line["outcome"]) for line in lines(caplog)]
    assert ends == [
        ("unknown", "NOT_FOUND"),
        ("secret words", "INVALID_REQUEST"),
        ("stopped", FinishReason.ABORTED.value),
    ]


async def test_a_call_s_x_request_id_names_its_request_unless_the_body_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given: Any = (("x-request-id", "mine"),)
    async with deployment() as d:
        stub, found = d.client.stub, []
        for request in (ask_for(PROMPT), ask_for(PROMPT, request_id="named")):
            call = stub.Generate(request, metadata=given)
            found.append(dict(await call.initial_metadata())["x-request-id"])
            assert [each async for each in call]
        refused = await error_of(stub.Generate(ask_for(""), metadata=given).read())
        found.append(dict(refused.trailing_metadata())["x-request-id"])
        assert [line["request_id"] for line in lines(caplog)] == found
        assert [name.partition("-")[0] for name in found] == ["mine", "named", "mine"]
        short = stub.ListModels(router_pb2.ListModelsRequest(), metadata=given)
        assert dict(await short.initial_metadata())["x-request-id"].startswith("mine-")


async def test_no_line_is_made_where_the_log_s_level_leaves_it_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "router.report.ended_request")
    async with deployment() as d:
        await d.client.ask(ask_for(PROMPT))
    assert not lines(caplog)


# --- targets ------------------------------------------------------------------------------------


def counted(router: Router) -> dict[tuple[str, str], float]:
    children = router.metrics.targets.children
    return {(target, result): count.value for (target, result), count in children.items()}


@pytest.mark.parametrize(
    ("ttft_ms", "itl_ms", "expected"),
    [
        (500, 50, {("ttft", "met"): 1, ("itl", "met"): 1}),
        (499, 49, {("ttft", "missed"): 1, ("itl", "missed"): 1}),
        (None, 50, {("itl", "met"): 1}),
        (None, None, {}),
    ],
)
async def test_a_request_meets_or_misses_the_targets_that_it_names(
    caplog: pytest.LogCaptureFixture,
    ttft_ms: int | None,
    itl_ms: int | None,
    expected: dict[tuple[str, str], float],
) -> None:
    clock = ManualClock(100.0)
    request = ask_for("prompt", 5)
    if ttft_ms is not None:
        request.ttft_target_ms = ttft_ms
    if itl_ms is not None:
        request.itl_target_ms = itl_ms
    router, output = output_for(clock, request)
    clock.advance(0.5)
    output.emit([97], [], None)
    clock.advance(3.0)  # the gap before the second token is the handoff's
    output.emit([97], [], None)
    for _ in range(3):
        clock.advance(0.05)
        output.emit([97], [], None)
    output.finish()
    assert counted(router) == expected
    [line] = lines(caplog)
    judged = {(n, line[f"{n}_target"]): 1 for n in ("ttft", "itl") if f"{n}_target" in line}
    assert judged == expected


@pytest.mark.parametrize(("waited_s", "expected"), [(0.4, {}), (0.6, {("ttft", "missed"): 1})])
async def test_a_request_without_a_token_has_missed_its_target_once_that_is_over(
    waited_s: float, expected: dict[tuple[str, str], float]
) -> None:
    clock = ManualClock(100.0)
    router, output = output_for(clock, ask_for("prompt", 5, ttft_target_ms=500))
    clock.advance(waited_s)
    output.fail(BatonError("lost"))
    assert counted(router) == expected


async def test_a_request_that_is_resumed_is_judged_by_nobody() -> None:
    clock = ManualClock(100.0)
    asked = ask_for("prompt", 1, request_id="mine", ttft_target_ms=500, resume_from_index=0)
    router, output = output_for(clock, asked)
    clock.advance(9.0)
    output.emit([97], [], None)
    output.finish()
    assert counted(router) == {}


def test_what_took_as_long_as_its_target_has_met_it() -> None:
    assert judged(0.5, 0.5, is_over=True) == "met"
    assert judged(0.5, 0.5, is_over=False) == ""
    assert judged(0.5, 0.6, is_over=False) == "missed"
    assert judged(None, 0.6, is_over=True) == ""


@pytest.mark.parametrize(
    ("traceparent", "expected"),
    [(PARENT, TRACE), (f"{PARENT}-later", TRACE), ("", ""), ("t", ""), (f"x{PARENT}", "")],
)
def test_a_trace_s_id_is_that_of_a_w3c_traceparent(traceparent: str, expected: str) -> None:
    assert trace_id(traceparent) == expected
