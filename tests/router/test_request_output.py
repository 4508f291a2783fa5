"""What a request reports of its own timing."""

from __future__ import annotations

import pytest

from baton.clock import ManualClock
from baton.finish_reason import FinishReason
from baton.grpc_options import WORKER_MESSAGE_BYTES
from baton.v1 import common_pb2, worker_pb2
from router.request.output import Finished, TokenRun, sendable_logprobs
from router.request.request_output import RequestOutput
from tests.router.answers import ask_for
from tests.router.request_outputs import output_for


def output_of(
    clock: ManualClock, num_tokens: int, min_tokens: int = 0, stop: str = ""
) -> RequestOutput:
    request = ask_for("prompt", num_tokens)
    request.sampling.min_tokens = min_tokens
    request.stop.extend([stop] if stop else [])
    return output_for(clock, request)[1]


def finish(output: RequestOutput) -> Finished:
    output.finish()
    assert isinstance(output.log.end, Finished)
    return output.log.end


async def test_tokens_that_come_together_share_the_gap_before_them() -> None:
    clock = ManualClock(100.0)
    output = output_of(clock, 14)
    clock.advance(0.5)
    output.emit([97], [], None)
    clock.advance(0.1)
    output.emit([97], [], None)
    for _ in range(3):  # four tokens every 0.2 s: 0.05 s each
        clock.advance(0.2)
        output.emit([97] * 4, [], None)
    end = finish(output)
    assert end.reason is FinishReason.LENGTH
    assert end.timings.ttft_s == pytest.approx(0.5)
    assert end.timings.second_token_s == pytest.approx(0.1)
    assert end.timings.itl_s == pytest.approx(0.05)


async def test_tokens_that_were_there_before_have_no_gaps() -> None:
    clock = ManualClock(100.0)
    output = output_of(clock, 23)
    output.emit([97] * 20, [], None)  # a request found running at its decode worker
    for _ in range(3):
        clock.advance(0.03)
        output.emit([97], [], None)
    timings = finish(output).timings
    assert timings.itl_s == pytest.approx(0.03)
    assert timings.tpot_s == pytest.approx(0.03)


async def test_tokens_at_once_after_the_first_say_nothing_of_the_model_s_speed() -> None:
    clock = ManualClock(100.0)
    for later_s in (0.0, 0.5):
        output = output_of(clock, 41)
        output.emit([97], [], None)
        clock.advance(0.00002)  # they waited here for the first one
        output.emit([97] * 30, [], None)
        clock.advance(later_s)
        if later_s:
            output.emit([97] * 10, [], FinishReason.STOP)
        assert finish(output).timings.tpot_s == pytest.approx(later_s / 10, rel=1e-3)


async def test_one_token_has_no_gap_at_all() -> None:
    clock = ManualClock(100.0)
    output = output_of(clock, 1)
    clock.advance(0.25)
    output.emit([97], [], None)
    timings = finish(output).timings
    assert (timings.itl_s, timings.second_token_s) == (0.0, 0.0)
    assert timings.ttft_s == pytest.approx(0.25)


async def test_the_prefill_worker_s_own_wait_and_work_are_apart() -> None:
    clock = ManualClock(100.0)
    output = output_of(clock, 1)
    clock.advance(0.25)
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
    min_tokens: int, num_out: int, text: str
) -> None:
    output = output_of(ManualClock(100.0), 10, min_tokens, "END")
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


@pytest.mark.parametrize("last", [b"E", b""])
async def test_text_that_only_began_a_stop_string_comes_with_the_end(last: bytes) -> None:
    """With the last token, or after it where a client has taken that."""
    output = output_of(ManualClock(100.0), 4, stop="END")
    reader = output.log.reader(0)
    for ids, finished, text in (
        (b"aEN", None, "a"),
        (last, FinishReason.LENGTH, "EN" + last.decode()),
    ):
        if output.emit(ids, [], finished):
            finish(output)
        run, *_ = await reader.take()
        assert isinstance(run, TokenRun)
        assert run.text == text


@pytest.mark.parametrize("max_message_bytes", [1 << 14, (1 << 31) - 1])
@pytest.mark.parametrize("num_prompt_bytes", [0, 4096])
def test_log_probabilities_that_are_out_go_with_the_request_where_a_worker_takes_the_message(
    max_message_bytes: int, num_prompt_bytes: int
) -> None:
    limit = min(max_message_bytes, WORKER_MESSAGE_BYTES)
    spec = worker_pb2.RequestSpec(token_ids=bytes(num_prompt_bytes))
    one = common_pb2.Logprobs(top=[common_pb2.TokenLogprob(id=1, logprob=-1.0)] * 20)
    num_sent = (limit // 2 - spec.ByteSize()) // one.ByteSize()
    known = [one] * num_sent
    assert sendable_logprobs(known, spec, max_message_bytes) == known
    reserve = worker_pb2.Reserve(spec=spec, emitted_logprobs=known)
    assert limit // 3 < reserve.ByteSize() < limit
    assert sendable_logprobs([*known, one], spec, max_message_bytes) == ()
