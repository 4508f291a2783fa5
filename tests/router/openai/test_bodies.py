"""Bodies that are too large, hold too much, or are not from whom they should be."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import grpc
import pytest
from pydantic import ValidationError

from baton.config.router import AuthConfig
from baton.v1 import router_pb2
from router.door.http.openai.bodies import (
    ChatBody,
    CompletionBody,
    TokenizeBody,
    choices_of,
    parsed,
)
from tests.router.answers import field_at_fault, refusal
from tests.router.deployment import Deployment
from tests.router.openai.spoken import Http, Speaks, prompt_for
from tests.router.openai.test_refusals import TOOL, USER
from tests.router.secured import RED

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_a_list_s_first_error_is_the_only_one() -> None:
    for kind, field in (
        *((ChatBody, field) for field in ("messages", "tools", "guided_choice")),
        *((CompletionBody, field) for field in ("prompt", "stop", "stop_token_ids")),
        *((TokenizeBody, field) for field in ("messages", "tools")),
    ):
        with pytest.raises(ValidationError) as caught:
            kind.model_validate_json(json.dumps({field: [{}] * 16}))
        assert caught.value.error_count() <= 5, field  # one for each kind of a union; what lacks


async def test_more_than_is_taken_is_refused_by_its_field(d: Deployment, http: Http) -> None:
    call = {"function": {"name": "f"}}
    part = {"type": "text", "text": ""}
    for path, body, param in (
        (COMPLETIONS, {"prompt": [{}] * 500_000}, "prompt"),
        (COMPLETIONS, {"prompt": ["x"] * 129}, "prompt"),
        (CHAT, {"messages": [USER] * 4097}, "messages"),
        (CHAT, {"messages": [{**USER, "content": [part] * 4097}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [call] * 1025}]},
         "messages[0].tool_calls"),
        (CHAT, {"messages": [USER], "tools": [TOOL] * 1025}, "tools"),
    ):  # fmt: skip
        answer = await http.post(path, body)
        assert (answer.status, answer.error["param"]) == (400, param), answer.text
        assert "more than 50,000" in answer.text or "at most" in answer.text
    empty = router_pb2.GenerateRequest()
    empty.chat.ParseFromString(b"\x0a\x00" * 200_000)
    error = await refusal(d.client, empty)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_at_fault(error) == "chat.messages"


async def test_a_body_is_as_large_as_the_context_needs_or_the_setting_says(
    speaks: Speaks, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with speaks() as (d, http):
        for context, limit in ((2048, 4 << 20), (200_000, 9_600_000), (10_000_000, 32 << 20)):
            monkeypatch.setattr(d.router.text, "max_model_len", context)
            description = (await http.call("GET", "/openapi.json")).json["info"]["description"]
            assert f"at most {limit} bytes" in description
            answer = await http.call("POST", COMPLETIONS, b" " * (limit + 1))
            assert answer.status == 413
            assert f"more than {limit} bytes" in answer.text
    async with speaks(clients={"max_request_bytes": 40_000}) as (d, http):
        assert (await http.post(COMPLETIONS, {"prompt": "x" * 40_000})).status == 413
        error = await refusal(d.client, router_pb2.GenerateRequest(text="x" * 40_000))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_choices_of_long_prompts_exist_one_at_a_time() -> None:
    prompts = ["\\u00e9" * 5000] * 64
    asked = {"prompt": prompts, "n": 2.0, "seed": 1.0}  # whole numbers, however they are written
    body, made, _ = parsed(CompletionBody, json.dumps(asked).encode())
    each = choices_of(made, body.num_choices)
    assert next(each) is made[0]
    assert [request.seed for request in each] == [2, *[1, 2] * 63]


async def test_large_requests_wait_in_the_tokenizer_s_line_and_small_ones_do_not(
    d: Deployment, http: Http
) -> None:
    api, gate = d.servers[0].api, threading.Event()
    holding = asyncio.create_task(api.off_loop(gate.wait, None, 1))
    large = [
        asyncio.create_task(http.post(COMPLETIONS, {"prompt": "x" * 100_000})),
        asyncio.create_task(refusal(d.client, router_pb2.GenerateRequest(text="x" * 100_000))),
    ]
    await d.until(lambda: api.tokenizer.line.num_requests == 3)
    assert (await http.post(COMPLETIONS, {"prompt": prompt_for("yes")})).status == 200
    gate.set()
    await holding
    assert (await large[0]).status == 400
    assert (await large[1]).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_web_page_cannot_call_a_developer_s_loopback(speaks: Speaks) -> None:
    async with speaks(http={"allowed_hosts": ("LLM.test",)}) as (_, http):
        for host in ("localhost", "LocalHost:8000", "127.0.0.1:1", "127.9.9.9", "[::1]:8000",
                     "llm.test:8000"):  # fmt: skip
            assert (await http.call("GET", "/health", headers={"host": host})).status == 200
        for host in ("evil.test", "localhost.evil.test", "10.0.0.1", "[", "", "0.0.0.0:8000"):
            answer = await http.call("GET", "/v1/models", headers={"host": host})
            assert (answer.status, answer.error["param"]) == (421, "host")
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            answer = await http.call("POST", CHAT, {}, {"Content-Type": kind})
            assert (answer.status, answer.error["param"]) == (415, "content-type")
            assert "application/json" in answer.error["message"]
        named = {"Content-Type": "Application/JSON; charset=utf-8"}
        assert (await http.call("POST", CHAT, {}, named)).error["param"] == "messages"


@pytest.mark.parametrize("is_open", [True, False])
async def test_elsewhere_any_host_and_content_type_is_served(
    speaks: Speaks, tmp_path: Path, is_open: bool
) -> None:
    (tmp_path / "tokens.yaml").write_text(f"red: {RED}\n")
    tokens = AuthConfig(str(tmp_path / "tokens.yaml"))
    changes = {"host": "0.0.0.0"} if is_open else {"auth": tokens}
    async with speaks(**changes) as (_, http):
        headers = {"authorization": f"Bearer {RED}", "host": "llm.test", "Content-Type": "x/y"}
        answer = await http.call("POST", CHAT, {"messages": []}, headers)
        assert answer.error["param"] == "messages"
