"""Errors in OpenAI's shape, each naming its field, and what is refused before it is read."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.router.deployment import Deployment
from tests.router.openai.spoken import CHAT, MARKS, Http, Speaks, prompt_for

TOOL = {"type": "function", "function": {"name": "f"}}
NO_TOOL = {"mode": "auto", "tools": []}
USER = {"role": "user", "content": "hi"}
OBJECT = {"type": "json_object"}


@pytest.fixture
def template() -> str:
    return MARKS["hermes"] + CHAT


async def test_every_wrong_field_of_a_chat_is_named(d: Deployment, http: Http) -> None:
    picture = {"type": "image_url", "image_url": {"url": "http://x"}}
    for fields, param in (
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [USER, {**USER, "audio": {"id": "a"}}]}, "messages[1].audio"),
        ({"messages": [{"role": "user", "content": [picture]}]}, "messages[0].content[0]"),
        ({"messages": [USER, {**USER, "tool_call_id": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [USER, {**USER, "tool_calls": [TOOL]}]}, "messages[1].tool_calls"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": 1e30}, "seed"),
        ({"ebnf": "root ::= x"}, "ebnf"),
        ({"ebnf": r'root ::= "\u00e9"'}, "ebnf"),
        ({"guided_regex": "x", "response_format": {"type": "json_object"}}, "response_format"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": NO_TOOL}},
         "tool_choice"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [999]}, "stop_token_ids[0]"),
        ({"seed": 1 << 70}, "seed"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"five": 1.0}}, "logit_bias"),
        ({"logit_bias": {"5": -101}}, "logit_bias[5]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"bad_words": ["a", ""]}, "bad_words[1]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
         "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "poem"}}, "response_format"),
        ({"response_format": OBJECT | {"schema": {"type": "x"}}}, "response_format.schema"),
        ({"response_format": OBJECT | {"json_schema": {"schema": {}}}}, "response_format"),
        ({"grammar": 'start: "x"'}, "grammar"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
         "structured_outputs.disable_any_whitespace"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [TOOL], "tool_choice": {**TOOL, "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "x"}}}],
          "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": {}}}, "tool_choice.function.name"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"request_id": "no spaces"}, "request_id"),
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"session_id": "x" * 200}, "session_id"),
    ):  # fmt: skip
        answer = await http.post("/v1/chat/completions", {"messages": [USER]} | fields)
        assert (answer.status, answer.error["param"]) == (400, param), (fields, answer.text)
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["message"]
    assert d.worker("d0").num_reserves == 0


async def test_every_wrong_field_of_a_completion_is_named(http: Http) -> None:
    for fields, param in (
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [5, 999]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": ["x"] * 65, "n": 2}, "prompt"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": ["a", "b"], "request_id": "r"}, "request_id"),
    ):
        answer = await http.post("/v1/completions", {"prompt": "x"} | fields)
        assert (answer.status, answer.error["param"]) == (400, param), (fields, answer.text)


async def test_a_prompt_beyond_the_context_and_an_unknown_model_have_openai_s_codes(
    http: Http,
) -> None:
    long = await http.post("/v1/completions", {"prompt": "x" * 3000})
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")
    assert "This model's maximum context length is 2048 tokens" in long.error["message"]
    for path, body in (
        ("/v1/completions", {"prompt": "x", "model": "gpt-9"}),
        ("/v1/chat/completions", {"messages": [USER], "model": "gpt-9"}),
    ):
        unknown = await http.post(path, body)
        assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
        assert unknown.error["param"] == "model"


async def test_tools_are_refused_where_the_model_writes_no_calls(speaks: Speaks) -> None:
    async with speaks("{{ messages[0].content }}") as (_, http):
        body = {"messages": [USER], "tools": [TOOL]}
        answer = await http.post("/v1/chat/completions", body)
        assert (answer.status, answer.error["param"]) == (400, "tools")


async def test_what_is_no_json_or_no_text_is_refused_and_harms_no_one(http: Http) -> None:
    half = json.dumps({"messages": [{"role": "user", "content": "\ud800"}]}).encode()
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    nested = '{"a":' * 150 + "0" + "}" * 150
    kwargs = (
        '{"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": ' + nested + "}"
    )
    for raw in (
        *(b"", b"{", b"[]", b"null", b'{"messages": "\xff\xfe"}', half, deep),
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "hi"}], "seed": ' + b"9" * 10_000 + b"}",
    ):
        answer = await http.call("POST", "/v1/chat/completions", raw)
        assert answer.status == 400, (raw[:40], answer.text)
        assert answer.error["type"] == "invalid_request_error"
    within = await http.call("POST", "/tokenize", kwargs.encode())
    assert within.status in (200, 400)
    assert (await http.chat("yes")).status == 200


async def test_unknown_paths_and_methods_are_refused_in_openai_s_shape(http: Http) -> None:
    for method, path, status in (
        ("GET", "/", 404),
        ("POST", "/v1/images/generations", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
    ):
        answer = await http.call(method, path, headers={"x-request-id": "mine"})
        assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")
        assert path in answer.error["message"]
        assert answer.headers["x-request-id"].startswith("mine-")


async def test_a_full_queue_says_when_to_come_again(speaks: Speaks) -> None:
    async with speaks(admission={"max_queue": 1, "overload_retry_s": 1.5}) as (d, http):
        d.router.fleet.arrays.max_running[:] = 0  # no room anywhere
        waiting = asyncio.create_task(http.chat("yes"))
        await d.until(lambda: len(d.router.admission) == 1)
        answer = await http.chat("yes", stream=True)
        assert (answer.status, answer.error["code"]) == (429, "overloaded")
        assert answer.error["type"] == "rate_limit_error"
        assert answer.headers["retry-after"] == "2"
        assert answer.headers["retry-after-ms"] == "1500"
        d.router.fleet.arrays.max_running[:] = 8
        d.router.admission.kick()
        assert (await waiting).status == 200


# --- over a bare connection -----------------------------------------------------------------------

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def raw(http: Http, *parts: bytes) -> bytes:
    """What comes back until the connection is closed."""
    reader, writer = await asyncio.open_connection(*http.address.split(":"))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_a_body_over_the_limit_is_refused_unread(speaks: Speaks) -> None:
    async with speaks(clients={"max_message_bytes": 10_000}) as (_, http):
        close = b"Connection: close\r\n"
        said = await raw(http, HEAD + close + b"Content-Length: 10000000000\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 413 ")
        assert b"10000 bytes" in said
        assert b"x-request-id" in said
        chunk = b"%x\r\n%s\r\n" % (6000, b"x" * 6000)
        said = await raw(http, HEAD + close + b"Transfer-Encoding: chunked\r\n\r\n", chunk, chunk)
        assert said.startswith(b"HTTP/1.1 413 ")
        expecting = HEAD + close + b"Expect: 100-continue\r\nContent-Length: 20000\r\n\r\n"
        assert (await raw(http, expecting)).startswith(b"HTTP/1.1 413 ")
        assert (await http.chat("yes")).status == 200


async def test_requests_that_trickle_are_ended(speaks: Speaks) -> None:
    async with speaks(http={"read_timeout_s": 0.3}) as (_, http):
        slow_body = HEAD + b"Content-Length: 100\r\n\r\n{"
        assert (await raw(http, slow_body)).startswith(b"HTTP/1.1 408 ")
        slow_heads = (b"", b"POST /v1/comp", HEAD)
        assert await asyncio.gather(*(raw(http, head) for head in slow_heads)) == [b""] * 3
        assert (await http.chat("yes")).status == 200


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere"])
async def test_chunks_of_a_byte_end_the_connection_and_larger_ones_are_taken(
    http: Http, path: bytes
) -> None:
    head = HEAD.replace(b"/v1/completions", path) + b"Transfer-Encoding: chunked\r\n\r\n"
    said = await raw(http, head, b"1\r\n \r\n" * 50_000)
    assert said == b"" or b" 404 " in said
    body = json.dumps({"prompt": prompt_for("yes"), "user": "x" * (1 << 20)}).encode()
    chunks = b"".join(b"200\r\n%s\r\n" % body[at : at + 512] for at in range(0, 1 << 20, 512))
    rest = body[1 << 20 :]
    head = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    said = await raw(http, head, chunks, b"%x\r\n%s\r\n0\r\n\r\n" % (len(rest), rest))
    assert b" 200 " in said


async def test_bodies_that_never_end_give_way_the_oldest_first(speaks: Speaks) -> None:
    async with speaks(clients={"max_unfinished_bytes": 90_000}) as (d, http):
        unfinished = d.servers[0]._sharing.unfinished
        begun = HEAD + b"Connection: close\r\nContent-Length: 60000\r\n\r\n" + b"x" * 50_000
        first = asyncio.create_task(raw(http, begun))
        await d.until(lambda: unfinished.num_bytes >= 50_000)
        second = asyncio.create_task(raw(http, begun))
        assert (await http.chat("yes")).status == 200
        said = await first
        assert said.startswith(b"HTTP/1.1 429 ")
        assert b"began first" in said
        second.cancel()


async def test_what_is_no_http_and_heads_without_end_are_refused(http: Http) -> None:
    for sent in (b"\x16\x03\x01\x00\xff\r\n\r\n", b"GET /\r\n\r\n"):
        said = await raw(http, sent)
        assert said.startswith(b"HTTP/1.1 400 ")
        assert b'{"error": {' in said
        assert b"x-request-id" in said
    both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    said = await raw(http, HEAD + both + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (said[:13], said.count(b"HTTP/1.1 ")) == (b"HTTP/1.1 400 ", 1)
    assert (await raw(http, HEAD + b"a:\r\n" * 1000 + b"\r\n"))[:13] == b"HTTP/1.1 400 "
    bomb = HEAD + b"".join(b"X-%d: %s\r\n" % (n, b"y" * 1000) for n in range(1000))
    assert (await raw(http, bomb))[:13] in (b"HTTP/1.1 400 ", b"")
    assert (await http.chat("yes")).status == 200


async def test_compressed_bodies_are_refused_by_name(http: Http) -> None:
    answer = await http.post("/v1/completions", {"prompt": "x"}, content_encoding="gzip")
    assert (answer.status, answer.error["param"]) == (400, "content-encoding")
