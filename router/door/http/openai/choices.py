"""A request's events as OpenAI's choices: pieces of a stream, or one whole answer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from baton.finish_reason import FinishReason
from baton.v1 import common_pb2
from router.door.api.api import Opened
from router.door.http.openai.bodies import ChatBody, CompletionBody
from router.request.output import Event, Finished, TokenRun
from router.text import TextModel
from router.text.answer import Said, Thought
from router.text.reasoning import CLOSE
from router.text.tools import CallDelta

Delta = dict[str, Any]

_REASONING = ("reasoning_content", "reasoning")  # what SGLang and others, and vLLM, call it
_LEAST_LOGPROB = -9999.0  # JSON has no infinities


class Choice(ABC):
    """Own one choice. `take` gives a stream's pieces; `whole`, at the end, the whole of them."""

    def __init__(self, index: int, opened: Opened, body: ChatBody | CompletionBody) -> None:
        self.index, self._body = index, body
        self._reasoning = list[str]()
        self._ids, self._num_told = list[int](), -1  # -1: nor is the prompt
        self.opened = opened
        self.end: Finished | None = None
        self._model, self._prompt = opened.router.text, opened.parsed.token_ids

    async def events(self) -> list[Event]:
        """Return what is new; nothing after the end. Raises the BatonError that the request ended
        with."""
        return await self.opened.reader.take()

    def take(self, events: Sequence[Event]) -> list[Delta]:
        """Return the entries of `choices` that these events are."""
        made: list[Delta] = []
        for event in events:
            if isinstance(event, TokenRun):
                self._ids += event.ids
                made += self._tokens(event)
            elif isinstance(event, Finished):
                self.end = event
                made += self._finish(event.reason)
                made[-1]["stop_reason"] = self.stop_reason
        if made and self._body.stream:
            made[0] |= self.own_ids()
        options = self._body.stream_options
        if self._body.includes_usage and options and options.continuous_usage_stats:
            for delta in made:
                delta["usage"] = _usage(len(self._prompt), len(self._ids))
        return made

    def own_ids(self) -> Delta:
        """Return the token ids that were not told yet, and the prompt's with the first of them."""
        if not self._body.return_token_ids:
            return {}
        start, self._num_told = self._num_told, len(self._ids)
        prompt = {"prompt_token_ids": list(map(int, self._prompt))} if start < 0 else {}
        return {"token_ids": self._ids[max(0, start) :], **prompt}

    @property
    def stop_reason(self) -> str | int | None:
        """Return the stop string or stop id that ended it, as vLLM has it; None until then."""
        stop, ids = self.end.stop if self.end else "", self._body.stop_token_ids or ()
        return stop if stop in self._body.stops else int(stop) if stop in map(str, ids) else None

    @property
    def num_reasoning_tokens(self) -> int:
        """Count the tokens up to `</think>`, at the end."""
        if not self._reasoning:
            return 0
        tail = ""
        for count, token_id in enumerate(self._ids, 1):
            tail = tail[-len(CLOSE) :] + self._model.token_text(token_id).decode(errors="replace")
            if CLOSE in tail:
                return count
        return len(self._ids)

    @abstractmethod
    def whole(self) -> Delta: ...

    @abstractmethod
    def _tokens(self, run: TokenRun) -> list[Delta]: ...

    @abstractmethod
    def _finish(self, reason: FinishReason) -> list[Delta]: ...


_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",  # by an Abort over gRPC
}


class ChatChoice(Choice):
    def __init__(self, index: int, opened: Opened, body: ChatBody) -> None:
        super().__init__(index, opened, body)
        self._content = list[str]()
        self._calls: list[Delta] = []
        self._logprobs: list[Delta] | None = [] if body.logprobs else None
        self._has_role = False
        self._reason: str | None = None
        self._is_parallel = body.parallel_tool_calls is not False
        self._answer = opened.answer_reader()

    def _tokens(self, run: TokenRun) -> list[Delta]:
        plain = [run.text] if run.text else []
        deltas = self._deltas(plain if self._answer is None else self._answer.push(run.text))
        logprobs = None
        if self._logprobs is not None:
            new = [_chat_logprob(self._model, *each) for each in zip(run.ids, run.logprobs)]
            self._logprobs += new
            logprobs = {"content": new}
            deltas = deltas or [{"content": ""}]
        return self._pieces(deltas, logprobs)

    def _finish(self, reason: FinishReason) -> list[Delta]:
        deltas = self._deltas([] if self._answer is None else self._answer.finish())
        has_called = reason is FinishReason.STOP and self._answer and self._answer.has_called
        self._reason = "tool_calls" if has_called else _REASONS[reason]
        made = self._pieces([*deltas, {}])
        made[-1]["finish_reason"] = self._reason
        return made

    def _pieces(self, deltas: list[Delta], logprobs: Delta | None = None) -> list[Delta]:
        """The first piece of all names the role. `logprobs` go with the first delta."""
        opening: list[Delta] = [] if self._has_role else [{"role": "assistant", "content": ""}]
        self._has_role = True
        made: list[Delta] = [
            {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in (*opening, *deltas)
        ]
        if logprobs is not None:
            made[len(opening)]["logprobs"] = logprobs
        return made

    def _deltas(self, said: Sequence[Said]) -> list[Delta]:
        made: list[Delta] = []
        for piece in said:
            if isinstance(piece, Thought):
                self._reasoning.append(piece.text)
                made.append(dict.fromkeys(_REASONING, piece.text))
            elif isinstance(piece, str):
                self._content.append(piece)
                made.append({"content": piece})
            elif self._is_parallel or piece.index == 0:
                made.append({"tool_calls": [self._called(piece)]})
        return made

    def _called(self, delta: CallDelta) -> Delta:
        if delta.name is None:
            self._calls[delta.index]["function"]["arguments"] += delta.arguments
            return {"index": delta.index, "function": {"arguments": delta.arguments}}
        function = {"name": delta.name, "arguments": delta.arguments}
        call = {"id": delta.call_id, "type": "function", "function": function}
        self._calls.append({**call, "function": dict(function)})
        return {"index": delta.index, **call}

    def whole(self) -> Delta:
        content = "".join(self._content)
        message: Delta = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message |= dict.fromkeys(_REASONING, "".join(self._reasoning))
        if self._calls:
            message |= {"content": content or None, "tool_calls": self._calls}
        logprobs = None if self._logprobs is None else {"content": self._logprobs}
        return {
            "index": self.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._reason,
        }


class TextChoice(Choice):
    def __init__(self, index: int, opened: Opened, body: CompletionBody) -> None:
        super().__init__(index, opened, body)
        self._texts: list[str] = []
        self._has_logprobs = body.logprobs is not None
        self._logprobs: list[Delta] = []
        shows: Any = {"after_text": True, "shows_special": body.skip_special_tokens is False}
        self._decoder = self._model.new_decoder(**shows)
        self._offset = 0  # of the first character that is not whole yet
        self._reason: str | None = None

    def _tokens(self, run: TokenRun) -> list[Delta]:
        self._texts.append(run.text)
        logprobs = None
        if self._has_logprobs and run.ids:
            new = [_text_logprob(self._model, *each) for each in zip(run.ids, run.logprobs)]
            for token_id, each in zip(run.ids, new):
                each["text_offset"] = max(0, self._offset)
                self._offset += len(self._decoder.push(token_id))
            self._logprobs += new
            logprobs = _columns(new)
        if not run.text and logprobs is None:
            return []
        return [self._piece(run.text, logprobs)]

    def _finish(self, reason: FinishReason) -> list[Delta]:
        self._reason = _REASONS[reason]
        return [self._piece("", None, self._reason)]

    def _piece(self, text: str, logprobs: Delta | None, reason: str | None = None) -> Delta:
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def whole(self) -> Delta:
        logprobs = _columns(self._logprobs) if self._has_logprobs else None
        return self._piece("".join(self._texts), logprobs, self._reason)


def usage_of(choices: Sequence[Choice], num_of_prompt: int) -> dict[str, Any]:
    """`num_of_prompt`: choices of each prompt, which counts once."""
    ends = [(each.index, each.end) for each in choices if each.end is not None]
    firsts = [end for index, end in ends if index % num_of_prompt == 0]
    prompt = sum(end.num_prompt_tokens for end in firsts)
    output = sum(end.num_output_tokens for _, end in ends)
    return {
        **_usage(prompt, output),
        "prompt_tokens_details": {"cached_tokens": sum(end.num_cached_tokens for end in firsts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(each.num_reasoning_tokens for each in choices)
        },
    }


def _usage(prompt: int, output: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


# --- log-probabilities ----------------------------------------------------------------------------


def _chat_logprob(model: TextModel, token_id: int, known: common_pb2.Logprobs) -> Delta:
    top = [_entry(model, each.id, each.logprob) for each in known.top]
    return {**_entry(model, token_id, _logprob_of(known)), "top_logprobs": top}


def _entry(model: TextModel, token_id: int, logprob: float) -> Delta:
    data = model.token_text(token_id)
    text = data.decode(errors="replace")
    return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}


def _text_logprob(model: TextModel, token_id: int, known: common_pb2.Logprobs) -> Delta:
    """The sampled token is among `top_logprobs`, under its text. Others of the same text, such as
    pieces of characters, are there as vLLM names tokens: `token_id:42`."""
    text = model.token_text(token_id).decode(errors="replace")
    logprob = _finite(_logprob_of(known))
    top = {text: logprob}
    for each in known.top:
        if each.id != token_id:
            other = model.token_text(each.id).decode(errors="replace")
            top[f"token_id:{each.id}" if other in top else other] = _finite(each.logprob)
    return {"tokens": text, "token_logprobs": logprob, "top_logprobs": top}


def _columns(rows: Sequence[Delta]) -> Delta:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [row[name] for row in rows] for name in names}


def _logprob_of(known: common_pb2.Logprobs) -> float:
    return known.logprob if known.rank else -math.inf  # not known any more


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB
