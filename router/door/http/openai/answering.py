"""The response to a body that asks for answers, as one JSON document or as server-sent events.

1. Every choice is opened. What is refused up to the first event has its own status.
2. Each choice's events are written as they come. A slow reader's tokens are coalesced.
3. A client that goes ends its requests, as over gRPC: a request that it named with `request_id`
   runs on for `resume_window_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from baton.errors import AlreadyExistsError, BatonError
from baton.v1 import router_pb2
from router.door.api.api import Api, Opened
from router.door.http.openai.bodies import ChatBody, CompletionBody
from router.door.http.openai.choices import ChatChoice, Choice, Delta, TextChoice, usage_of
from router.door.http.openai.echo import EchoChoice
from router.door.http.server.errors import FAULT, shape, shape_of, status_of
from router.request.output import Event

log = logging.getLogger(__name__)

_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


@dataclass(frozen=True)
class Asked:
    """A body, and what it became."""

    body: ChatBody | CompletionBody
    requests: Iterable[router_pb2.GenerateRequest]
    """One for each choice."""
    request_id: str
    """What the answer and the log call it."""
    renamed: Mapping[str, str]
    given: Any = None
    """What the client sent, where another API's body became this one."""

    @property
    def is_chat(self) -> bool:
        return isinstance(self.body, ChatBody)


class Answering:
    """Write the answer to one HTTP request; an ASGI application for it alone."""

    def __init__(self, api: Api, asked: Asked) -> None:
        self._api, self._asked = api, asked
        body = asked.body
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{asked.request_id}",
            "object": "chat.completion" if asked.is_chat else "text_completion",
            "created": int(time.time()),
            "model": api.units.model_names[0],
        }
        if body.stream and asked.is_chat:
            self._head["object"] += ".chunk"
        self._before = b"data: " + _json(self._head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if body.includes_usage else b"]}\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._serve(scope, receive, send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
        if not work.cancelled():
            work.result()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._asked.body
        with contextlib.ExitStack() as stack:
            choices = []
            for index, request in enumerate(self._asked.requests):
                suffix = f".{index}" if index else ""
                opened = await self._api.open(request, self._asked.request_id + suffix)
                if opened is None:
                    problem = "the request was aborted over gRPC"
                    raise AlreadyExistsError(problem, field="request_id")
                stack.callback(opened.leave)
                choices.append(self._choice(index, opened))
            if body.stream:
                await self._stream(choices, send)
            else:
                await JSONResponse(await self._whole(choices))(scope, receive, send)

    def _choice(self, index: int, opened: Opened) -> Choice:
        body = self._asked.body
        if isinstance(body, ChatBody):
            return ChatChoice(index, opened, body)
        if body.echo or body.prompt_logprobs is not None:
            return EchoChoice(index, opened, body)
        return TextChoice(index, opened, body)

    # --- one document --------------------------------------------------------------------------

    async def _whole(self, choices: Sequence[Choice]) -> Delta:
        async def run(choice: Choice) -> None:
            while events := await choice.events():
                choice.take(events)

        await _all(*(run(choice) for choice in choices))
        made = [c.whole() | c.own_ids() | {"stop_reason": c.stop_reason} for c in choices]
        return {
            **self._head,
            **self._beside(made[0]),
            "choices": made,
            "usage": usage_of(choices, self._asked.body.num_choices),
        }

    # --- server-sent events --------------------------------------------------------------------

    async def _stream(self, choices: Sequence[Choice], send: Send) -> None:
        first = await choices[0].events()
        await self._begin(send, choices)

        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async def run(choice: Choice, events: list[Event]) -> None:
            while True:
                if data := b"".join(map(self._line, choice.take(events))):
                    await write(data)
                if not (events := await choice.events()):
                    return

        async def begin(choice: Choice) -> None:
            if events := await choice.events():
                await run(choice, events)

        try:
            await _all(run(choices[0], first), *map(begin, choices[1:]))
            last = self._ending(choices)
        except BatonError as error:
            last = self._failing(status_of(error), shape_of(error, self._asked.renamed))
        except Exception:
            log.exception("the stream of %s ends with an error", self._asked.request_id)
            last = self._failing(500, shape(500, FAULT))
        await write(last, more=False)

    async def _begin(self, send: Send, choices: Sequence[Choice]) -> None:
        raw = [(name.encode(), value.encode()) for name, value in _STREAM_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        if opening := self._opening(choices):
            await send({"type": "http.response.body", "body": opening, "more_body": True})

    def _opening(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def _ending(self, choices: Sequence[Choice]) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._asked.body.includes_usage:
            return done
        usage = usage_of(choices, self._asked.body.num_choices)
        return _event({**self._head, "choices": [], "usage": usage}) + done

    def _failing(self, status: int, error: Delta) -> bytes:
        return _event(error)

    def _line(self, choice: Delta) -> bytes:
        if beside := self._beside(choice):
            usage = {"usage": None} if self._asked.body.includes_usage else {}
            return _event({**self._head, "choices": [choice], **usage, **beside})
        return self._before + _json(choice) + self._after

    def _beside(self, choice: Delta) -> Delta:
        """Take out of a choice what stands beside the choices: in vLLM a chat's prompt does."""
        names = ("usage", "prompt_token_ids") if self._asked.is_chat else ("usage",)
        return {name: choice.pop(name) for name in names if name in choice}


def _event(value: Any) -> bytes:
    return b"data: " + _json(value) + b"\n\n"


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


async def _all(*works: Any) -> None:
    """Run them together. Raises the first BatonError, once all have ended."""
    if len(works) == 1:
        await works[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except* BatonError as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
