"""A router whose model says what its prompt tells it to, and callers of its HTTP door.

The prompt holds the answer between two control characters; it is found there byte by byte.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.config import settings
from baton.model_folder import find_text_files
from router.text import TextModel
from tests.router import scripted_tokens, scripted_worker
from tests.router.deployment import EOS, Deployment, byte_files, deployment

BEGIN, END, TURN = "\x02", "\x03", "\x1c"
_MAX_MODEL_LEN = 2048
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% if m.tool_call_id %}[{{ m.tool_call_id }} of {{ m.name }}]{% endif %}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if thinks %}<think>{% endif %}" + TURN
)
MARKS = {
    "hermes": "{# <tool_call> #}",
    "mistral": "{# [TOOL_CALLS] #}",
    "llama3": "{# <|python_tag|> #}",
    "none": "",
}


def saying(text: str) -> str:
    """In a prompt: what the answer is."""
    return BEGIN + text + END


def prompt_for(text: str) -> str:
    return saying(text) + TURN


def _spoken_token(seed: int, tokens: Sequence[int]) -> int:
    """The next byte of the answer; its end after the last one."""
    begin, end, turn = (tokens.index(ord(char)) for char in (BEGIN, END, TURN))
    answer, said = tokens[begin + 1 : end], len(tokens) - turn - 1
    return answer[said] if said < len(answer) else EOS


def chat_model(folder: Path, template: str) -> TextModel:
    folder.mkdir(exist_ok=True)
    for name, data in byte_files().items():
        (folder / name).write_bytes(data)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = _MAX_MODEL_LEN
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return TextModel(find_text_files(folder))


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> Any:
        error = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """Of a stream that ended as it should."""
        assert self.headers["content-type"].startswith("text/event-stream"), self.text
        *lines, last, rest = self.text.split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        return [json.loads(line.removeprefix("data: ")) for line in lines]


@dataclass
class Http:
    """One router's HTTP door."""

    address: str
    tls: ssl.SSLContext | None = None

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        return await asyncio.to_thread(self._call, method, path, body, headers or {})

    async def post(self, path: str, body: Any, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.call("POST", path, body, named)

    async def chat(self, answer: str, **fields: Any) -> Answer:
        messages = [{"role": "user", "content": saying(answer)}]
        return await self.post("/v1/chat/completions", {"messages": messages} | fields)

    async def complete(self, answer: str, **fields: Any) -> Answer:
        return await self.post("/v1/completions", {"prompt": prompt_for(answer)} | fields)

    def _call(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> Answer:
        if self.tls is None:
            connection = http.client.HTTPConnection(self.address, timeout=20)
        else:
            connection = http.client.HTTPSConnection(self.address, timeout=20, context=self.tls)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            text = response.read().decode()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, named, text)
        finally:
            connection.close()


Speaks = Callable[..., AbstractAsyncContextManager[tuple[Deployment, Http]]]
"""`spoken` in a test's own folder: of a template, and a router's settings."""


@asynccontextmanager
async def spoken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, template: str = CHAT, **changes: Any
) -> AsyncIterator[tuple[Deployment, Http]]:
    monkeypatch.setattr(scripted_tokens, "next_token", _spoken_token)
    monkeypatch.setattr(scripted_worker, "MAX_MODEL_LEN", _MAX_MODEL_LEN)
    model = chat_model(folder / "model", template)
    async with deployment(text_model=model, **settings.merge({"http": {"port": 0}}, changes)) as d:
        address = d.servers[0].http_address
        assert address is not None
        yield d, Http(address)
