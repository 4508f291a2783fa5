"""Chat completions and completions over HTTP: every field, as one document and as a stream."""

from __future__ import annotations

import asyncio
import json
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.config.router import TenantLimits
from baton.errors import ConfigError
from baton.v1 import common_pb2, router_pb2, worker_pb2
from router.door.grpc.service import _tokens
from router.door.http.openai.choices import Choice
from router.request.output import TokenRun
from router.text.answer import AnswerReader
from tests.router import scripted_worker
from tests.router.answers import Answer
from tests.router.deployment import Deployment
from tests.router.openai.spoken import CHAT, MARKS, Http, Speaks, prompt_for, saying

CALLS = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


async def test_a_chat_is_answered_with_its_usage(http: Http) -> None:
    answer = (await http.chat("Hugo, the miller.", model="tiny")).json
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "Hugo, the miller."
    assert choice["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["completion_tokens"] == len("Hugo, the miller.") + 1  # and its end
    assert usage["prompt_tokens"] == len("<user>") + len(saying("Hugo, the miller.")) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_streamed_chat_begins_with_its_role_and_ends_with_its_reason(http: Http) -> None:
    events = (await http.chat("wéll", stream=True)).events
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "wéll"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert not any("usage" in event for event in events)


async def test_a_stream_has_its_usage_where_that_is_asked_for(http: Http) -> None:
    options = {"include_usage": True}
    *events, last = (await http.complete("abc", stream=True, stream_options=options)).events
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    refused = await http.complete("abc", stream_options=options)
    assert (refused.status, refused.error["param"]) == (400, "stream_options")


async def test_a_text_is_continued_as_one_document_and_as_a_stream(http: Http) -> None:
    answer = (await http.complete("and they sang")).json
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == "and they sang"
    events = (await http.complete("and they sang", stream=True)).events
    assert {event["object"] for event in events} == {"text_completion"}
    assert "".join(event["choices"][0]["text"] for event in events) == "and they sang"


async def test_prompts_may_be_ids_and_several(http: Http) -> None:
    texts = ["one", "two"]
    ids = [list(prompt_for(text).encode()) for text in texts]
    several: tuple[Any, ...] = ([prompt_for(text) for text in texts], ids)
    for prompt in several:
        answer = (await http.post("/v1/completions", {"prompt": prompt, "n": 2})).json
        found = [(choice["index"], choice["text"]) for choice in answer["choices"]]
        assert found == [(0, "one"), (1, "one"), (2, "two"), (3, "two")]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert answer["usage"]["completion_tokens"] == 4 * 4
    one = (await http.post("/v1/completions", {"prompt": ids[0]})).json
    assert one["choices"][0]["text"] == "one"


async def test_choices_stream_together_each_under_its_number(d: Deployment, http: Http) -> None:
    events = (await http.chat("all of it", stream=True, n=3, seed=5)).events
    texts = {0: "", 1: "", 2: ""}
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == dict.fromkeys(texts, "all of it")
    seeds = {run.spec.seed for run in d.worker("d0").finished.values()}
    assert seeds == {5, 6, 7}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_an_answer_ends_at_its_length(http: Http, name: str) -> None:
    answer = (await http.chat("much too long", **{name: 4})).json
    assert answer["choices"][0]["message"]["content"] == "much"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_what_the_client_asks_for_reaches_the_worker(d: Deployment, http: Http) -> None:
    asked = {
        "temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "max_tokens": 40, "min_tokens": 2,
    }  # fmt: skip
    own = {"priority": 3, "cache_salt": "s", "timeout_ms": 5000, "session_id": "x", "user": "me"}
    answer = await http.chat("yes", **asked, **own, stop_token_ids=[250], seed=-1, nobody=["knows"])
    assert answer.status == 200
    (run,) = d.worker("d0").finished.values()
    sampling = run.spec.sampling
    assert {name: getattr(sampling, name) for name in asked} == asked
    assert run.spec.seed == (1 << 64) - 1
    assert 250 in run.spec.stop_token_ids
    nulls = await http.chat("yes", **dict.fromkeys(asked), seed=None, stop=None, tools=None)
    assert nulls.status == 200


async def test_logprobs_come_with_the_tokens_that_they_are_of(http: Http) -> None:
    asked = {"logprobs": True, "top_logprobs": 2}
    whole = (await http.chat("hi", **asked)).json["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in whole] == ["h", "i", "<end>"]
    assert whole[0]["bytes"] == [ord("h")]
    assert whole[0]["logprob"] == -0.25
    assert [each["token"] for each in whole[0]["top_logprobs"]] == ["h", "i"]
    events = (await http.chat("hi", **asked, stream=True)).events
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [one for part in parts if part for one in part["content"]] == whole
    none = (await http.chat("hi")).json["choices"][0]["logprobs"]
    assert none is None
    alone = (await http.chat("hi", logprobs=True)).json["choices"][0]["logprobs"]["content"]
    assert alone[0]["top_logprobs"] == []


async def test_a_completions_logprobs_are_columns(http: Http) -> None:
    columns = (await http.complete("hi", logprobs=1)).json["choices"][0]["logprobs"]
    assert columns["tokens"] == ["h", "i", "<end>"]
    assert columns["token_logprobs"] == [-0.25] * 3
    assert columns["top_logprobs"] == [{"h": -0.25}, {"i": -0.25}, {"<end>": -0.25}]


async def test_a_completions_offsets_point_into_its_text(http: Http) -> None:
    for said in ("é!", "naïve x", "日本 ok", "\U0001f600 ok", "plain"):
        choice = (await http.complete(said, logprobs=1)).json["choices"][0]
        tokens, offsets = (choice["logprobs"][name] for name in ("tokens", "text_offset"))
        assert offsets[-1] == len(choice["text"]) == len(said)
        for token, at in zip(tokens, offsets):
            assert token in ("\ufffd", "<end>", said[at : at + 1])
        events = (await http.complete(said, logprobs=1, stream=True)).events
        parts = [part for event in events if (part := event["choices"][0]["logprobs"])]
        for name, column in choice["logprobs"].items():
            assert [each for part in parts for each in part[name]] == column
    asked = {"prompt": [256, *prompt_for("ab").encode()], "echo": True, "logprobs": 1}
    choice = (await http.post("/v1/completions", asked)).json["choices"][0]
    assert choice["text"] == "<end>" + prompt_for("ab") + "ab", "special tokens included"
    count = len(choice["logprobs"]["tokens"])
    assert choice["logprobs"]["text_offset"] == [0, *range(5, 5 + count - 1)]


async def test_a_completions_top_logprobs_keep_their_number_and_the_sampled_token(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    tops = (await http.complete("日本", logprobs=3)).json["choices"][0]["logprobs"]["top_logprobs"]
    assert [len(top) for top in tops] == [3] * 7  # pieces of characters, all U+FFFD
    assert tops[0] == {"\ufffd": -0.25, f"token_id:{0xE7}": -1.25, f"token_id:{0xE8}": -2.25}

    def unlikely(spec: worker_pb2.RequestSpec, tokens: list[int]) -> list[common_pb2.Logprobs]:
        others = [common_pb2.TokenLogprob(id=ord("x"), logprob=-0.5)][: spec.sampling.logprobs]
        return [common_pb2.Logprobs(logprob=-3.0, rank=9, top=others) for _ in tokens]

    monkeypatch.setattr(scripted_worker, "logprobs_of", unlikely)
    for asked, others in ((1, {"x": -0.5}), (0, {})):
        columns = (await http.complete("h", logprobs=asked)).json["choices"][0]["logprobs"]
        assert columns["top_logprobs"][0] == {"h": -3.0} | others


async def test_a_completion_has_16_tokens_where_its_client_names_no_number(
    http: Http, speaks: Speaks
) -> None:
    async with speaks(limits=TenantLimits(largest_max_tokens=5)) as (_, few):
        for door, fields, count in (
            (http, {}, 16), (http, {"max_tokens": None}, 16), (http, {"min_tokens": 20}, 20),
            (few, {}, 5), (few, {"max_tokens": 4}, 4),
        ):  # fmt: skip
            answer = (await door.complete("x" * 30, **fields)).json
            assert answer["usage"]["completion_tokens"] == count
            assert answer["choices"][0]["finish_reason"] == "length"
    assert (await http.chat("x" * 30)).json["usage"]["completion_tokens"] == 31


async def test_a_request_that_is_sent_again_after_its_end_is_answered_as_before(
    speaks: Speaks,
) -> None:
    echo = {"echo": True, "logprobs": 1, "prompt_logprobs": 0, "request_id": "e"}
    thinks = {"chat_template_kwargs": {"thinks": True}, "request_id": "t"}
    async with speaks("{# <think> #}" + CHAT) as (_, http):
        for ask in (
            partial(http.complete, "ab", **echo),
            partial(http.chat, "h</think>a", **thinks),
        ):
            first, again = (await ask()).json, (await ask()).json
            assert first["choices"] == again["choices"]


async def test_top_k_of_minus_one_is_all_whatever_the_model_s_default(
    speaks: Speaks, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").write_text('{"top_k": 5}')
    async with speaks() as (d, http):
        for number, (asked, used) in enumerate(((-1, 0), (0, 0), (7, 7), (None, 5))):
            assert (await http.chat("yes", top_k=asked, request_id=f"r{number}")).status == 200
            assert d.worker("d0").finished[f"r{number}"].spec.sampling.top_k == used


async def test_content_may_be_parts_of_text_and_developers_are_the_system(
    d: Deployment, http: Http
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": saying("yes")}]
    refusal = [{"type": "refusal", "refusal": "no"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "content": refusal},
        {"role": "user", "content": parts},
    ]
    answer = await http.post("/v1/chat/completions", {"messages": messages})
    assert answer.json["choices"][0]["message"]["content"] == "yes"
    (run,) = d.worker("d0").finished.values()
    prompt = bytes(run.tokens[: run.num_prompt]).decode()
    assert prompt.startswith(f"<system>be brief<assistant>no<user>one\n{saying('yes')}")


async def test_what_a_model_thinks_is_apart_from_its_answer(speaks: Speaks) -> None:
    async with speaks("{# <think> #}" + CHAT) as (_, http):
        said = "<think>\nhm</think>\n\nyes"
        answer = (await http.chat(said)).json
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("\nhm", "yes")
        assert message["reasoning"] == "\nhm"  # as vLLM calls it
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 18}
        thinks = {"thinks": True}
        for event in (
            await http.chat("hm</think>yes", stream=True, chat_template_kwargs=thinks)
        ).events:
            for name, text in event["choices"][0]["delta"].items():
                message[f"seen_{name}"] = message.get(f"seen_{name}", "") + text
        assert (message["seen_reasoning_content"], message["seen_content"]) == ("hm", "yes")
        plain = (await http.chat("yes <think> no")).json["choices"][0]["message"]
        assert plain["content"] == "yes <think> no"
        own = await http.chat("hm", chat_template_kwargs={"messages": []})
        assert own.error["param"] == "chat_template_kwargs"


async def test_stop_strings_apply_to_the_answer_and_not_to_the_thoughts(speaks: Speaks) -> None:
    thoughts, answer = "Question: END\n", "The answer: 4 END."
    async with speaks("{# <think> #}" + CHAT) as (d, http):
        for opened in (True, False):
            said = f"{'' if opened else '<think>'}{thoughts}</think>\n\n{answer}"
            fields: dict[str, Any] = {"chat_template_kwargs": {"thinks": opened}}
            for stop, content in (
                ("Question:", answer), ("\n\n", answer), ("END", "The answer: 4 "), ("The", ""),
            ):  # fmt: skip
                whole = (await http.chat(said, stop=stop, **fields)).json["choices"][0]
                message = whole["message"]
                assert (message["reasoning_content"], message["content"]) == (thoughts, content)
                events = (await http.chat(said, stop=stop, stream=True, **fields)).events
                seen = [event["choices"][0]["delta"].get("content", "") for event in events]
                assert "".join(seen) == content
        asked = router_pb2.ChatMessage(role="user", content=saying(f"{thoughts}</think>{answer}"))
        chat = router_pb2.ChatMessages(messages=[asked], template_arguments='{"thinks": true}')
        over_grpc = await d.client.ask(router_pb2.GenerateRequest(chat=chat, stop=["END"]))
        assert (over_grpc.reasoning, over_grpc.text) == (thoughts, "The answer: 4 ")


async def test_a_model_s_calls_come_as_calls(speaks: Speaks) -> None:
    async with speaks(MARKS["hermes"] + CHAT) as (_, http):
        choice = (await http.chat(f"Sure.\n{CALLS}\n{CALLS}", tools=TOOLS)).json["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Sure."
        first, second = choice["message"]["tool_calls"]
        assert first["type"] == "function"
        assert first["function"] == {"name": "f", "arguments": '{"a": 1}'}
        assert first["id"] != second["id"]
        one = await http.chat(CALLS + CALLS, tools=TOOLS, parallel_tool_calls=False)
        message = one.json["choices"][0]["message"]
        assert (message["content"], len(message["tool_calls"])) == (None, 1)
        unread = (await http.chat(CALLS, tools=TOOLS, tool_choice="none")).json["choices"][0]
        assert (unread["message"]["content"], unread["finish_reason"]) == (CALLS, "stop")
        await check_streamed_call(await http.chat(CALLS, tools=TOOLS, stream=True))
        for stop, why in (("arguments", "stop"), ("</tool_call>", "tool_calls")):
            ended = (await http.chat(CALLS, tools=TOOLS, stop=stop)).json["choices"][0]
            assert ended["finish_reason"] == why, "a call that is cut off is none to run"
            assert len(ended["message"]["tool_calls"]) == 1
        forced = await http.chat(CALLS, tools=TOOLS, tool_choice="required", max_tokens=15)
        cut = forced.json["choices"][0]  # within the call's name
        assert (cut["message"]["content"], cut["finish_reason"]) == ("", "length")


async def test_baton_takes_its_own_answer_back_whatever_the_model_wrote(speaks: Speaks) -> None:
    async with speaks(MARKS["hermes"] + CHAT) as (d, http):
        for number, said in enumerate((
            '<tool_call>{"name": "f", "arguments": {"city": "Par',
            '<tool_call>{"name": "", "arguments": {"a": 1 2}}</tool_call>',
            r'<tool_call>{"name": "\ud83d", "arguments": "5"}</tool_call>',
        )):  # fmt: skip
            message = (await http.chat(said, tools=TOOLS)).json["choices"][0]["message"]
            (call,) = message["tool_calls"]
            assert (await http.chat(said, tools=TOOLS, stream=True)).events
            result = {"role": "tool", "tool_call_id": call["id"], "content": "bad arguments"}
            asked = {"role": "user", "content": saying("again")}
            body = {"messages": [message, result, asked], "request_id": f"r{number}"}
            answer = await http.post("/v1/chat/completions", body)
            assert answer.json["choices"][0]["message"]["content"] == "again"
            run = d.worker("d0").finished[f"r{number}"]
            prompt = bytes(run.tokens[: run.num_prompt]).decode()
            assert json.dumps({"malformed": call["function"]["arguments"]}) in prompt


async def check_streamed_call(answer: Any) -> None:
    deltas = [event["choices"][0]["delta"] for event in answer.events]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["id"]
    assert calls[0]["function"]["name"] == "f"
    assert all(call["index"] == 0 and "id" not in call for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    assert answer.events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_calls_and_their_results_go_back_into_the_template(speaks: Speaks) -> None:
    async with speaks(MARKS["mistral"] + CHAT) as (d, http):
        said = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'
        message = (await http.chat(said, tools=TOOLS)).json["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert len(call["id"]) == 9  # Mistral's templates refuse others
        messages = [
            message,
            {"role": "tool", "tool_call_id": call["id"], "content": "42"},
            {"role": "user", "content": saying("it is 42")},
        ]
        body = {"messages": messages, "tools": TOOLS, "request_id": "last"}
        answer = (await http.post("/v1/chat/completions", body)).json
        assert answer["choices"][0]["message"]["content"] == "it is 42"
        runs = d.worker("d0").finished
        prompt = bytes(runs["last"].tokens[: runs["last"].num_prompt]).decode()
        assert '"function": {"name": "f", "arguments": {"a": 1}}' in prompt
        assert f"<tool>42[{call['id']} of f]" in prompt
        assert '"parameters": {"type": "object"}' in prompt


async def test_a_client_that_goes_ends_its_requests_unless_it_named_them(
    d: Deployment, http: Http
) -> None:
    worker = d.worker("d0")
    for fields, is_kept in (({}, False), ({"n": 2}, False), ({"request_id": "mine"}, True)):
        worker.may_decode.clear()
        _, writer = await asyncio.open_connection(*http.address.split(":"))
        body = body_of(fields)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        count = fields.get("n", 1)
        await d.until(lambda count=count: len(worker.runs) == count)
        writer.close()
        if is_kept:
            worker.may_decode.set()
            again = await http.complete("a long story", stream=True, **fields)
            assert "".join(e["choices"][0]["text"] for e in again.events) == "a long story"
        else:
            await d.until(lambda: not worker.runs)


def body_of(fields: dict[str, Any]) -> bytes:
    return json.dumps({"prompt": prompt_for("a long story"), "stream": True} | fields).encode()


async def test_a_request_id_is_echoed_and_names_the_request(d: Deployment, http: Http) -> None:
    body = {"prompt": prompt_for("a")}
    for stream in (False, True):
        answer = await http.post(
            "/v1/completions", body | {"stream": stream}, x_request_id="trace.7"
        )
        assert answer.headers["x-request-id"].startswith("trace.7-")
    named = await http.post("/v1/completions", body | {"request_id": "mine"})
    assert named.json["id"] == "cmpl-mine"
    assert "mine" in d.worker("d0").finished
    other = await http.post("/v1/completions", body | {"request_id": "mine", "max_tokens": 1})
    assert (other.status, other.error["param"]) == (409, "request_id")
    assert other.headers["x-should-retry"] == "false"
    assert other.headers["x-request-id"] == "mine"


async def test_a_failure_within_a_stream_is_its_last_event(d: Deployment, http: Http) -> None:
    d.worker("d0").may_decode.clear()
    answer = await http.complete("a story", stream=True, timeout_ms=500)
    assert answer.status == 200
    assert answer.text.split("\n\n")[-2].startswith('data: {"error":{')
    assert '"code":"deadline"' in answer.text
    whole = await http.complete("a story", timeout_ms=100)
    assert (whole.status, whole.headers["x-should-retry"]) == (504, "false")
    d.worker("d0").may_decode.set()


async def test_what_fails_unforeseen_ends_a_stream_with_an_error_and_a_whole_answer_with_500(
    http: Http, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise UnicodeEncodeError("utf-8", "", 0, 1, "whatever it may be")

    monkeypatch.setattr(Choice, "take", broken)
    for n in (1, 2):
        streamed = await http.chat("yes", stream=True, n=n)
        assert streamed.status == 200
        last = streamed.text.removesuffix("\n\n").split("\n\n")[-1].removeprefix("data: ")
        assert json.loads(last)["error"]["type"] == "server_error"
        assert "UnicodeEncodeError" in caplog.text
        caplog.clear()
        whole = await http.chat("yes", n=n)
        assert (whole.status, whole.error["type"]) == (500, "server_error")
        assert whole.headers["x-request-id"]


async def test_a_reader_that_is_slow_gets_everything_in_fewer_pieces(
    d: Deployment, http: Http
) -> None:
    text = "a long story, " * 60
    body = body_of(
        {"prompt": prompt_for(text), "logprobs": 20, "max_tokens": len(text), "timeout_ms": 20_000}
    )
    host, _, port = http.address.rpartition(":")
    server = d.servers[0].http
    assert server is not None
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections' too
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect((host, int(port)))
        head = b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        slow.sendall(head + body)
        await d.until(lambda: bool(d.worker("d0").finished))
        slow.setblocking(True)
        received = await asyncio.to_thread(read_all, slow)
    lines = received.decode().split("\r\n\r\n", 1)[1].split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    assert "".join(choice["text"] for choice in choices) == text
    assert len(choices) < len(text), "tokens that it did not take came together"


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


async def test_grpc_has_the_same_chats_and_answers_as_typed_messages(speaks: Speaks) -> None:
    said = f"<think>hm </think>Sure.\n{CALLS}\n{CALLS}"
    call = router_pb2.ToolCall(id="c1", name="f", arguments='{"a": 1}')
    chat = router_pb2.ChatMessages(
        messages=[
            router_pb2.ChatMessage(role="assistant", tool_calls=[call]),
            router_pb2.ChatMessage(role="tool", tool_call_id="c1", content="42"),
            router_pb2.ChatMessage(role="user", parts=[router_pb2.ContentPart(text=saying(said))]),
        ],
        tools=[router_pb2.Tool(name="f")],
    )
    messages = [
        {"role": "assistant", "tool_calls": [
            {"id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "user", "content": saying(said)},
    ]  # fmt: skip
    body = {"messages": messages, "tools": [{"function": {"name": "f"}}]}
    async with speaks(
        "{# <think> #}" + MARKS["hermes"] + CHAT, clients={"resume_window_s": 20.0}
    ) as (d, http):
        request = router_pb2.GenerateRequest(chat=chat, request_id="r")
        whole = await d.client.ask(request)
        ids = (await d.client.stub.Tokenize(router_pb2.TokenizeRequest(chat=chat))).ids
        (run,) = d.worker("d0").finished.values()
        assert list(ids) == run.tokens[: run.num_prompt]
        assert (await http.post("/tokenize", body)).json["tokens"] == list(ids)
        (choice,) = (await http.post("/v1/chat/completions", body)).json["choices"]
        message, calls = choice["message"], choice["message"]["tool_calls"]
        assert bytes(whole.ids[:-1]).decode() == said
        assert (whole.reasoning, whole.text) == (message["reasoning"], message["content"])
        assert [name for _, name in whole.calls] == [call["function"]["name"] for call in calls]
        assert whole.arguments == "".join(call["function"]["arguments"] for call in calls)
        assert whole.reason == common_pb2.FINISH_REASON_TOOL_CALLS
        for index in range(len(whole.ids) + 1):  # its client comes back, having seen so many
            request.resume_from_index = index
            seen, rest = Answer(), await d.client.ask(request)
            pieces = AnswerReader(d.router.text, [], {"f"}, "", False).push(said[:index])
            seen.take(_tokens(TokenRun(0, whole.ids[:index], "", ()), pieces))
            for name in ("reasoning", "text", "arguments"):
                assert getattr(seen, name) + getattr(rest, name) == getattr(whole, name)
            assert whole.calls[len(seen.calls) :] == rest.calls
            assert rest.finished == whole.finished
        request = router_pb2.GenerateRequest(chat=chat)
        del request.chat.tools[:]
        without = await d.client.ask(request)
        assert (without.text, without.calls) == (f"Sure.\n{CALLS}\n{CALLS}", [])


async def test_a_router_that_leaves_finishes_its_streams_and_takes_nothing_new(
    d: Deployment, http: Http
) -> None:
    worker, server = d.worker("d0"), d.servers[0]
    worker.may_decode.clear()
    streaming = asyncio.create_task(http.chat("to the end", stream=True))
    await d.until(lambda: any(run.task is not None for run in worker.runs.values()))
    leaving = asyncio.create_task(server.stop(10.0))
    await d.until(lambda: not server.http_app.is_ready)
    refused = await http.chat("nothing new")
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert "x-should-retry" not in refused.headers
    assert (await http.call("GET", "/ready")).status == 503
    worker.may_decode.set()
    events = (await streaming).events
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert said == "to the end"
    await leaving


async def test_routers_of_one_machine_may_share_the_port(speaks: Speaks) -> None:
    async with speaks(reuse_port=True) as (d, http):
        port = int(http.address.rpartition(":")[2])
        await d.add_router(http={"port": port})
        for _ in range(4):
            assert (await http.chat("yes")).status == 200
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use"):
            await d.add_router(http={"port": port}, reuse_port=False)
