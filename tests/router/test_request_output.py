"""What a request tells of its own timing."""

from __future__ import annotations

import random

import pytest

from baton.v1 import router_pb2, worker_pb2
from router.metrics import RouterMetrics
from router.output import Finished, FinishReason
from router.request_output import RequestOutput
from router.router import Router
from router.run_parts import Arrival
from router.served_model import ServedModel
from router.text import TextModel
from router.validate import RequestLimits, parse_generate
from tests.router.deployment import QUICK, ask_for
from tests.router.scripted_worker import MODEL
from tests.router.test_placement import Clock


def output_for(
    text_model: TextModel, clock: Clock, request: router_pb2.GenerateRequest
) -> tuple[Router, RequestOutput]:
    router = Router(
        QUICK,
        "127.0.0.1:1",
        ServedModel(MODEL, text_model),
        RouterMetrics(),
        on_fault=lambda task: None,
        clock=clock,
        rng=random.Random(0),
    )
    parsed = parse_generate(request, text_model, RequestLimits(512, model_names=(MODEL,)))
    arrival = Arrival("id", parsed, "", clock(), 0.0)
    return router, RequestOutput(arrival, router._parts)


def output_of(
    text_model: TextModel, clock: Clock, num_tokens: int, min_tokens: int = 0, stop: str = ""
) -> RequestOutput:
    request = ask_for("prompt", num_tokens)
    request.sampling.min_tokens = min_tokens
    request.stop.extend([stop] if stop else [])
    return output_for(text_model, clock, request)[1]


def finish(output: RequestOutput) -> Finished:
    output.finish()
    assert isinstance(output.log.end, Finished)
    return output.log.end


async def test_tokens_that_come_together_share_the_gap_before_them(text_model: TextModel) -> None:
    clock = Clock()
    output = output_of(text_model, clock, 14)
    clock.now_s += 0.5
    output.emit([97], [], None)
    clock.now_s += 0.1
    output.emit([97], [], None)
    for _ in range(3):  # four tokens every 0.2 s: 0.05 s each
        clock.now_s += 0.2
        output.emit([97] * 4, [], None)
    end = finish(output)
    assert end.reason is FinishReason.LENGTH
    assert end.timings.ttft_s == pytest.approx(0.5)
    assert end.timings.second_token_s == pytest.approx(0.1)
    assert end.timings.itl_s == pytest.approx(0.05)


async def test_tokens_that_were_there_before_have_no_gaps(text_model: TextModel) -> None:
    clock = Clock()
    output = output_of(text_model, clock, 23)
    output.emit([97] * 20, [], None)  # a request found running at its decode worker
    for _ in range(3):
        clock.now_s += 0.03
        output.emit([97], [], None)
    assert finish(output).timings.itl_s == pytest.approx(0.03)


async def test_one_token_has_no_gap_at_all(text_model: TextModel) -> None:
    clock = Clock()
    output = output_of(text_model, clock, 1)
    clock.now_s += 0.25
    output.emit([97], [], None)
    timings = finish(output).timings
    assert (timings.itl_s, timings.second_token_s) == (0.0, 0.0)
    assert timings.ttft_s == pytest.approx(0.25)


async def test_the_prefill_worker_s_own_wait_and_work_are_told_apart(text_model: TextModel) -> None:
    clock = Clock()
    output = output_of(text_model, clock, 1)
    clock.now_s += 0.25
    output.first_token(worker_pb2.FirstToken(id=97, queue_ms=40.0, prefill_ms=150.0), 0)
    output.emit([97], [], None)
    timings = finish(output).timings
    assert timings.prefill_queue_s == pytest.approx(0.04)
    assert timings.prefill_s == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("min_tokens", "num_out", "text"),
    [
        (0, 4, "a"),
        (3, 4, "a"),  # it ends with the first token that may end the answer
        (4, 9, "aENDab"),
        (8, 9, "aENDab"),  # it began before it might
        (9, 10, "aENDabENDc"),
    ],
)
async def test_no_stop_string_ends_an_answer_within_its_least_tokens(
    text_model: TextModel, min_tokens: int, num_out: int, text: str
) -> None:
    output = output_of(text_model, Clock(), 10, min_tokens, "END")
    answer, is_over = list(b"aENDabENDc"), False
    for token_id in answer:
        is_over = output.emit([token_id], [], None)
        if is_over:
            break
    assert is_over
    assert output.log.ids == answer[:num_out]
    assert "".join(output.log.texts) + output.log.tail == text
    end = finish(output)
    assert end.stop == ("END" if num_out < 10 else "")
