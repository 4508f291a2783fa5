"""The router's door: errors with details, health, reflection, models, the fleet, explanations."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_tools import protoc

from baton import status
from baton.errors import InvalidRequestError
from baton.v1 import common_pb2, control_pb2, control_pb2_grpc, router_pb2
from router.request.alarm import Alarm
from router.request.attempt import Attempt
from router.request.request_run import RequestRun
from tests.generated_code import ROOT
from tests.router.answers import (
    PROMPT,
    ask_for,
    assert_whole,
    error_of,
    error_reason,
    expected,
    field_at_fault,
    refusal,
)
from tests.router.deployment import DECODE, deployment
from tests.router.scripted_worker import FINGERPRINT, MODEL


async def test_a_wrong_field_is_named_and_nothing_else_is_touched() -> None:
    async with deployment() as d:
        bad = ask_for(PROMPT)
        bad.sampling.top_p = 7.0
        error = await refusal(d.client, bad)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field_at_fault(error) == "sampling.top_p"
        assert error_reason(error) == "INVALID_SAMPLING"
        unknown = await refusal(d.client, ask_for(PROMPT, model="unknown"))
        assert unknown.code() is grpc.StatusCode.NOT_FOUND
        too_long = await refusal(d.client, ask_for("x" * 600))
        assert too_long.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_reason(too_long) == "INVALID_PROMPT"
        for wrong, reason in (
            ({"stop": [""]}, "INVALID_SAMPLING"), ({"regex": "("}, "INVALID_CONSTRAINT"),
            ({"tenant": "\n"}, "INVALID_REQUEST"),
        ):  # fmt: skip
            again = status.from_rpc_error(await refusal(d.client, ask_for(PROMPT, **wrong)))
            assert (type(again), again.reason) == (InvalidRequestError, reason)
        assert d.worker("d0").num_reserves == 0


async def test_an_unreadable_message_is_the_caller_s_mistake_and_harms_no_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with deployment() as d:
        worker = d.worker("d0")
        worker.may_decode.clear()
        running = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: bool(worker.runs))
        service = "/baton.v1.RouterService"
        generate = d.client.channel.unary_stream(f"{service}/Generate")
        tokenize = d.client.channel.unary_unary(f"{service}/Tokenize")
        field_is_text = bytes([3 << 3 | 2, 2])  # GenerateRequest.text, two bytes
        for raw in (field_is_text + b"\xff\xfe", field_is_text, b"no protobuf at all"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in generate(raw):
                    pass
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "unreadable message" in (caught.value.details() or "")
            assert error_reason(caught.value) == "INVALID_REQUEST"
        assert (
            await error_of(tokenize(bytes([1 << 3 | 2, 1, 0xFF])))
        ).code() is grpc.StatusCode.INVALID_ARGUMENT
        worker.may_decode.set()
        assert_whole(await running, PROMPT)
        traces = [record for record in caplog.records if record.exc_info]
        ours = [record for record in traces if record.name.startswith(("router", "baton"))]
        assert not ours, "nothing is logged as a fault of the router's"
        assert not [trace for trace in traces if "servicer method" in trace.getMessage()]


@pytest.mark.parametrize(("prefill", "decode", "missing"), [(1, 0, "decode"), (0, 1, "prefill")])
async def test_without_workers_of_a_role_a_request_is_unavailable_after_a_while(
    prefill: int, decode: int, missing: str
) -> None:
    async with deployment(
        prefill, decode, admission={"fleet_wait_s": 0.2}, placement={"local_prefill": "never"}
    ) as d:
        error = await refusal(d.client, ask_for(PROMPT))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert missing in (error.details() or "")


async def test_stop_strings_end_the_text_and_abort_the_worker() -> None:
    async with deployment() as d:
        text = bytes(expected(PROMPT, 40)).decode()
        stop = text[20:23]
        answer = await d.client.ask(ask_for(PROMPT, 400, stop=[stop]))
        assert answer.text == text[: text.index(stop)]
        assert answer.ids == expected(PROMPT, text.index(stop) + 3)
        assert answer.finished is not None
        assert answer.finished.stop == stop
        assert answer.finished.reason == common_pb2.FINISH_REASON_STOP
        await d.check_empty()
        assert len(d.worker("d0").cancels) == 1


async def test_a_stop_id_ends_the_request_and_is_no_part_of_the_text() -> None:
    async with deployment() as d:
        tokens = expected(PROMPT, 40)
        stop = tokens[9]
        ends = tokens.index(stop)
        answer = await d.client.ask(ask_for(PROMPT, 40, stop_token_ids=[stop]))
        assert answer.ids == tokens[: ends + 1]
        assert answer.text == bytes(tokens[:ends]).decode()
        assert answer.finished is not None
        assert answer.finished.stop == str(stop)


async def test_a_drawn_seed_is_shown_and_gives_the_same_tokens_again() -> None:
    async with deployment() as d:
        request = ask_for(PROMPT)
        request.ClearField("seed")
        first = await d.client.ask(request)
        assert_whole(first, PROMPT, seed=first.routed[0].seed)
        other = await d.client.ask(request)
        assert other.routed[0].seed != first.routed[0].seed


async def test_a_client_needs_the_public_proto_files_alone(tmp_path: Path) -> None:
    names, compiled = ("baton/v1/router.proto", "baton/v1/common.proto"), tmp_path / "compiled"
    (tmp_path / "baton/v1").mkdir(parents=True)
    for name in names:
        shutil.copy(ROOT / "proto" / name, tmp_path / name)
    assert protoc.main(["", f"-I{tmp_path}", f"--descriptor_set_out={compiled}", *names]) == 0
    files = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes())
    known = message_factory.GetMessages(files.file)
    async with deployment() as d:
        generate: Any = d.client.channel.unary_stream(
            "/baton.v1.RouterService/Generate",
            request_serializer=known["baton.v1.GenerateRequest"].SerializeToString,
            response_deserializer=known["baton.v1.GenerateResponse"].FromString,
        )
        answer = [each async for each in generate(known["baton.v1.GenerateRequest"](text="a"))]
        assert answer[-1].finished.usage.num_prompt_tokens == 1


async def test_explain_route_lists_what_generate_chooses() -> None:
    async with deployment(2, 2, placement={"local_prefill": "auto"}) as d:
        prompt = "a long prompt that several requests have in common, with a different end: "
        await d.client.ask(ask_for(prompt + "one"))
        explained = await d.client.stub.ExplainRoute(
            router_pb2.ExplainRouteRequest(request=ask_for(prompt + "two"))
        )
        assert len(explained.candidates) == 6  # 2 x 2 pairs and local prefill on either
        costs = [candidate.cost_ms for candidate in explained.candidates]
        assert costs == sorted(costs)
        best = explained.candidates[0]
        assert best.num_cached_tokens_decode > 0
        assert {term.name for term in best.terms} >= {"queue", "prefill", "decode"}
        assert sum(term.ms for term in best.terms) == pytest.approx(best.cost_ms, rel=1e-3)
        answer = await d.client.ask(ask_for(prompt + "two"))
        assert answer.routed[0].prefill_worker == best.prefill_worker
        assert answer.routed[0].decode_worker == best.decode_worker


async def test_models_tokens_fleet_and_health_are_served() -> None:
    async with deployment() as d:
        stub = d.client.stub
        models = (await stub.ListModels(router_pb2.ListModelsRequest())).models
        assert [(m.name, m.max_model_len, m.vocab_size) for m in models] == [(MODEL, 512, 257)]
        tokens = await stub.Tokenize(router_pb2.TokenizeRequest(text="abc"))
        assert list(tokens.ids) == [97, 98, 99]
        fleets = control_pb2_grpc.FleetServiceStub(d.client.channel)
        watching = fleets.WatchFleet(control_pb2.FleetServiceWatchFleetRequest())
        fleet = (await anext(aiter(watching))).fleet
        assert {w.info.ref.worker_id for w in fleet.workers} == {"p0", "d0"}
        watching.cancel()
        health = health_pb2_grpc.HealthStub(d.client.channel)
        for name in ("", "baton.v1.RouterService"):
            check = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert check.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_missed_kv_event_degrades_the_index_until_the_next_snapshot() -> None:
    async with deployment() as d:
        worker = d.worker("p0")
        worker.kv.queues[0].put_nowait(None)
        worker.kv.hold(FINGERPRINT, list(b"some prompt that is long enough"))
        entry = d.entry("p0")
        await d.until(lambda: d.router.index.num_blocks(entry.slot) == 7)
        assert len(worker.kv.queues) == 2
        d.router.check_integrity()


async def test_a_prefix_that_one_worker_holds_draws_its_requests_there() -> None:
    async with deployment(3, 3) as d:
        prompt = "the very same beginning of a rather long story about a fox, "
        first = await d.client.ask(ask_for(prompt))
        for end in ("one", "two", "three"):
            answer = await d.client.ask(ask_for(prompt + end))
            assert answer.routed[0].prefill_worker == first.routed[0].prefill_worker
            assert answer.routed[0].decode_worker == first.routed[0].decode_worker
            assert answer.routed[0].num_cached_tokens_prefill >= 56
        salted = await d.client.ask(ask_for(prompt + "four", cache_salt="mine"))
        assert salted.routed[0].num_cached_tokens_prefill == 0


async def test_many_requests_at_once_on_two_and_two_a_third_of_them_cancelled() -> None:
    async with deployment(2, 2) as d:

        async def one(number: int) -> None:
            prompt = f"request number {number}"
            request = ask_for(prompt, 5 + number % 30)
            if number % 3:
                assert_whole(await d.client.ask(request), prompt, 5 + number % 30)
            else:
                wanted = number % 5
                await d.client.ask(request, until=lambda answer: len(answer.ids) >= wanted)

        await asyncio.gather(*(one(number) for number in range(120)))


async def test_nothing_is_kept_of_five_hundred_short_requests() -> None:
    async with deployment(2, 2, clients={"resume_window_s": 0.05}) as d:

        async def one(number: int) -> None:
            request = ask_for(f"short {number}", 4, tenant=f"tenant {number % 50}")
            if number % 4 == 1:
                request.request_id = f"named-{number}"
            if number % 5 == 2:
                await d.client.ask(request, until=lambda answer: bool(answer.routed))
            elif number % 25 == 3:
                request.sampling.top_p = 9.0
                await refusal(d.client, request)
            else:
                assert_whole(await d.client.ask(request), f"short {number}", 4)

        for start in range(0, 500, 100):
            await asyncio.gather(*(one(number) for number in range(start, start + 100)))
        await d.check_empty()
        router = d.router
        await d.until(lambda: len(router.runs) == 0)
        router.check_integrity()  # no timer is left either
        gc.collect()
        # Not isinstance: it asks every object for its class, and some answer with a warning.
        kinds = (RequestRun, Attempt, Alarm)
        kept = [type(o).__name__ for o in gc.get_objects() if type(o) in kinds]
        assert not kept


async def test_a_request_that_names_no_length_gets_what_its_worker_has_memory_for() -> None:
    async with deployment(decode=0) as d:
        await d.add_worker("small", DECODE, max_model_len=65, max_request_tokens=64)
        await d.add_worker("large", DECODE, max_model_len=97, max_request_tokens=96)
        await d.connected(3)
        for worker_id, length in (("small", 65), ("large", 97)):
            other = d.entry("large" if worker_id == "small" else "small")
            d.router.fleet.hold(other, 60.0)
            request = ask_for("0123456789")
            request.ClearField("sampling")
            request.sampling.ignore_eos = True
            answer = await d.client.ask(request)
            assert answer.routed[-1].decode_worker == worker_id
            assert len(answer.ids) == length - 10
            assert answer.reason == common_pb2.FINISH_REASON_LENGTH
            d.router.fleet.arrays.hold_until_s[:] = 0.0
        for max_tokens, code, reason in (
            (88, grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_CAPACITY"),
            (503, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_SAMPLING"),
        ):
            error = await refusal(d.client, ask_for("0123456789", max_tokens))
            assert error.code() is code
            assert error_reason(error) == reason
            assert field_at_fault(error) == "sampling.max_tokens"


async def test_a_tenant_with_a_long_name_is_refused_before_it_waits_for_the_tokenizer() -> None:
    async with deployment() as d:
        free, tokenizing = threading.Event(), d.servers[0].api.tokenizer
        busy = asyncio.create_task(tokenizing.run(lambda: free.wait(10), "other", 1, 10.0))
        try:
            error = await refusal(d.client, ask_for("to be", tenant="t" * 129, timeout_ms=1000))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        finally:
            free.set()
            await busy
