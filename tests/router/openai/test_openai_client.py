"""The official `openai` client, unchanged: sync, async, streams, tools, errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from baton.config.router import AuthConfig
from tests.router.deployment import Deployment
from tests.router.openai.spoken import CHAT, MARKS, prompt_for, saying, spoken

openai = pytest.importorskip("openai")

T = TypeVar("T")
KEY = "red-token-1"
README = (Path(__file__).resolve().parents[3] / "README.md").read_text()
CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Köln"}}</tool_call>'
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a town",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
        },
    }
]


UNKNOWN: Any = {"type": "function", "function": {"name": "news"}}


@pytest.fixture
async def door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Deployment, str]]:
    (tmp_path / "tokens.yaml").write_text(f"red: {KEY}\n")
    auth = AuthConfig(str(tmp_path / "tokens.yaml"))
    template = "{# <think> #}" + MARKS["hermes"] + CHAT
    async with spoken(tmp_path, monkeypatch, template, auth=auth) as (d, http):
        yield d, f"http://{http.address}/v1"


def asking(text: str) -> Any:
    return [{"role": "user", "content": saying(text)}]


async def in_thread(url: str, work: Callable[[Any], T]) -> T:
    def run() -> T:
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            return work(client)

    return await asyncio.to_thread(run)


async def test_the_sync_client_chats_completes_and_lists(door: tuple[Deployment, str]) -> None:
    _, url = door

    def work(client: Any) -> None:
        answer = client.chat.completions.create(
            model="tiny", messages=asking("Grüezi"), logprobs=True, top_logprobs=1, seed=4
        )
        assert answer.choices[0].message.content == "Grüezi"
        assert answer.choices[0].logprobs.content[0].token == "G"
        assert answer.usage.total_tokens > 0
        text = client.completions.create(model="tiny", prompt=prompt_for("abc"), n=2)
        assert [choice.text for choice in text.choices] == ["abc", "abc"]
        assert [model.id for model in client.models.list()] == ["tiny", "alias"]
        assert client.models.retrieve("tiny").id == "tiny"
        options = {"include_usage": True}
        chunks = list(
            client.chat.completions.create(
                model="tiny", messages=asking("one"), stream=True, stream_options=options
            )
        )
        assert chunks[-1].usage.completion_tokens == 4
        seen = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
        assert seen == "one"

    await in_thread(url, work)


async def test_the_async_client_streams_reasoning_and_calls_of_tools(
    door: tuple[Deployment, str],
) -> None:
    _, url = door
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=asking("<think>hm</think>" + CALL), tools=TOOLS
        )
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.tool_calls[0].function.arguments == '{"town": "Köln"}'
        assert message.reasoning_content == "hm"
        async with client.chat.completions.stream(
            model="tiny", messages=asking("Wait. " + CALL), tools=TOOLS
        ) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        assert {"content.delta", "tool_calls.function.arguments.delta"} <= kinds
        assert final.choices[0].message.content == "Wait."
        (call,) = final.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"town": "Köln"}')
        history = [
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"},
            *asking("It rains."),
        ]
        last = await client.chat.completions.create(model="tiny", messages=history, tools=TOOLS)
        assert last.choices[0].message.content == "It rains."


async def test_the_client_s_errors_are_those_that_it_knows(door: tuple[Deployment, str]) -> None:
    _, url = door

    def work(client: Any) -> None:
        chats = client.chat.completions
        with pytest.raises(openai.BadRequestError) as bad:
            chats.create(model="tiny", messages=asking("x"), top_p=7)
        assert bad.value.param == "top_p"
        with pytest.raises(openai.NotFoundError) as unknown:
            chats.create(model="gpt-9", messages=asking("x"))
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as forced:
            chats.create(model="tiny", messages=asking("x"), tools=TOOLS, tool_choice=UNKNOWN)
        assert forced.value.param == "tool_choice"
        with pytest.raises(openai.APIStatusError) as missing:
            client.embeddings.create(model="tiny", input="x")
        assert missing.value.status_code == 501
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="nonsense").models.list()

    await in_thread(url, work)


async def test_a_client_that_leaves_its_stream_ends_its_request(
    door: tuple[Deployment, str],
) -> None:
    d, url = door
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=asking("a long story" * 50), stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        assert d.worker("d0").runs
        d.worker("d0").may_decode.clear()
        await stream.close()
        await d.until(lambda: not d.worker("d0").runs)
        d.worker("d0").may_decode.set()


async def test_the_readme_s_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
        if "OpenAI" in block
    )
    async with spoken(tmp_path, monkeypatch) as (_, http):
        for old, new in (
            ("127.0.0.1:8000", http.address),
            ('"demo"', '"tiny"'),
            ('"Tell me a story."', repr(saying("Once upon a time"))),
        ):
            assert old in code
            code = code.replace(old, new)
        await asyncio.to_thread(exec, compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "Once upon a time"
