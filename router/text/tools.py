"""Tool calls in an answer's text, found while it streams.

- hermes (Hermes, Qwen): `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, again for each
  call.
- llama3: `{"name": "f", "parameters": {...}}` as the whole answer, with `;` between calls. Or
  `<|python_tag|>` and the same, or `<|python_tag|>f.call(key="value")`.
- mistral: `[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`, or `[TOOL_CALLS]f[ARGS]{...}`.

A parser's output does not depend on how the text was cut into pieces. Arguments come as the model
writes them. What turns out to be no call is text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Literal

ToolFormat = Literal["hermes", "llama3", "mistral"]

MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
}
_ARGUMENTS = ("arguments", "parameters")
_CALL = re.compile(r"[\w.-]+\.call\(.*\)", re.DOTALL)


def tool_format_of(template: str) -> ToolFormat | None:
    """The format in which a chat template makes its model write calls; None: it names none."""
    if "tools" not in template or "<function=" in template:  # the latter is Qwen3-Coder's XML
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    is_llama = "<|python_tag|>" in template or "Environment: ipython" in template
    return "llama3" if is_llama else None


@dataclass(frozen=True)
class CallDelta:
    """A further piece of a call. The first one of each call has its name."""

    index: int
    name: str | None
    arguments: str


Piece = str | CallDelta


@dataclass
class _Call:
    """Read `{"name": "f", "arguments": {...}}` character by character."""

    name: str | None = None
    is_done: bool = False
    is_broken: bool = False
    arguments: str = ""  # not taken yet
    _has_arguments: bool = False
    _depth: int = 0
    _in_string: bool = False
    _escaped: bool = False
    _key: str | None = None  # of the value that comes
    _token: list[str] = field(default_factory=list)  # of a key, or of a value but arguments
    _is_complete: bool = False  # the value: a comma or the end follows

    @property
    def is_over(self) -> bool:
        return self.is_done or self.is_broken

    def push(self, char: str) -> None:
        if self._in_string:
            self._keep(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                if self._depth == 1:
                    self._end_string()
        elif self._depth == 0:
            self._depth, self.is_broken = 1, char != "{"
        elif self._depth == 1:
            self._push_outer(char)
        else:
            self._push_inner(char)

    def _push_outer(self, char: str) -> None:
        """Between the keys and values of the object itself."""
        if char in " \t\r\n":
            return
        if char == ":" and self._token and self._key is None:
            self._key, self._token = self._text_of_token(), []
        elif char == "," or char == "}":
            self._end_value()
            self.is_done = char == "}" and not self.is_broken
            self._depth -= char == "}"
        elif self._is_complete or (self._key is None and (char != '"' or self._token)):
            self.is_broken = True
        else:
            self._keep(char)
            self._in_string = char == '"'
            self._depth += char in "{["

    def _push_inner(self, char: str) -> None:
        self._keep(char)
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        if self._depth == 1:
            self._is_complete = True

    def _keep(self, char: str) -> None:
        is_streamed = self._key in _ARGUMENTS and not (self._depth == 1 and self._token)
        if is_streamed and (self._depth > 1 or char in "{["):
            self.arguments += char
            self._has_arguments = True
        else:
            self._token.append(char)

    def _end_string(self) -> None:
        self._is_complete = self._key is not None
        if self._key == "name":
            self.name = self._text_of_token()

    def _end_value(self) -> None:
        """At a comma or the object's end."""
        if self._key in _ARGUMENTS and self._token and not self._has_arguments:
            self.arguments += self._text_of_token() if self._token[0] == '"' else ""
            self._has_arguments = bool(self.arguments)
        elif self._key is None and (self._token or self._depth != 1):
            self.is_broken = True
        self._key, self._token, self._is_complete = None, [], False

    def _text_of_token(self) -> str:
        try:
            text = json.loads("".join(self._token))
        except ValueError:
            text = None
        if not isinstance(text, str):
            self.is_broken = True
            return ""
        return text

    def take(self) -> str:
        """Arguments since the last time. A call without any has an empty object."""
        if self.is_done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        taken, self.arguments = self.arguments, ""
        return taken


class ToolParser:
    """Own what was not decided yet of one answer's text."""

    def __init__(self, marker: str, names: Collection[str]) -> None:
        """`names`: of the tools that the request has."""
        self._marker, self._names = marker, names
        self._text = ""  # not looked at yet
        self._raw = ""  # of the call that is read: text, if it turns out to be none
        self._out: list[Piece] = []
        self._call = _Call()
        self._is_shown = False  # the call's name is out
        self._num_calls = 0
        self._state: Callable[[], bool] = self._outside

    def push(self, text: str) -> list[Piece]:
        self._text, self._out = self._text + text, []
        while self._text and self._state():
            pass
        return self._out

    def finish(self) -> list[Piece]:
        """What was held back, once it is certain that nothing follows."""
        self._out = []
        rest = self._raw + self._text
        if not self._is_shown and (rest.strip() or not self._num_calls):
            self._put(rest)
        return self._out

    # States take from `_text`, and return whether the next one has something to do.

    def _outside(self) -> bool:
        """Text up to the marker. White space before a marker, and after a call, is nobody's."""
        before, found, after = self._text.partition(self._marker)
        shown = before if found else before[: -_begun(before, self._marker) or None]
        stripped = shown.rstrip()
        held = "" if found else before[len(stripped) :]
        if self._num_calls:
            stripped = stripped.lstrip() if not stripped.strip() else stripped
        self._put(stripped)
        if found:
            self._raw, self._text, self._state = self._marker, after, self._after_marker
        else:
            self._text = held
        return bool(found)

    def _after_marker(self) -> bool:
        raise NotImplementedError

    def _after_call(self) -> bool:
        raise NotImplementedError

    def _skip(self, chars: str) -> str:
        """Drop what stands before the next part; the character that follows, or none."""
        rest = self._text.lstrip(chars)
        self._raw += self._text[: len(self._text) - len(rest)]
        self._text = rest
        return rest[:1]

    def _begin(self, head: str = "") -> bool:
        """A call begins; `head` is read before the model's own text."""
        self._call, self._is_shown = _Call(), False
        for char in head:
            self._call.push(char)
        self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        call, position = self._call, 0
        for position, char in enumerate(self._text, 1):  # noqa: B007
            call.push(char)
            if call.is_over or (call._is_complete and call._depth == 1 and self._is_bare):
                break
        self._raw += self._text[:position]
        self._text = self._text[position:]
        if self._is_bare and call._is_complete and not call.is_over:
            call.push("}")
        self._show()
        if call.is_over:
            self._end_call()
        return call.is_over

    _is_bare = False
    """The model writes the arguments alone."""

    def _is_call(self, name: str) -> bool:
        return True

    def _show(self) -> None:
        call = self._call
        if call.name is None or (call.is_broken and not self._is_shown):
            return
        if not self._is_shown and not self._is_call(call.name):
            call.is_broken = True
            return
        arguments = call.take()
        if not self._is_shown or arguments:
            name = None if self._is_shown else call.name
            self._put_call(CallDelta(self._num_calls, name, arguments))
        self._is_shown, self._raw = True, ""

    def _end_call(self) -> None:
        if self._is_shown:
            self._num_calls += 1
            self._state = self._after_call
        else:
            self._put(self._raw)
            self._state = self._outside
        self._is_shown, self._raw = False, ""

    def _put(self, text: str) -> None:
        if text and self._out and isinstance(self._out[-1], str):
            self._out[-1] += text
        elif text:
            self._out.append(text)

    def _put_call(self, delta: CallDelta) -> None:
        self._out.append(delta)


def _begun(text: str, marker: str) -> int:
    """How many characters at the end of `text` may begin the marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


class HermesParser(ToolParser):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__("<tool_call>", names)

    def _after_marker(self) -> bool:
        return bool(self._skip(" \t\r\n")) and self._begin()

    def _after_call(self) -> bool:
        """Up to the closing marker; what a broken call leaves is dropped."""
        end = "</tool_call>"
        if end in self._text:
            self._text, self._state = self._text.partition(end)[2], self._outside
            return True
        if "<tool_call>" in self._text:  # never closed
            self._text = "<tool_call>" + self._text.partition("<tool_call>")[2]
            self._state = self._outside
            return True
        self._text = self._text[len(self._text) - _begun(self._text, "<") :] or self._text[-12:]
        return False


class MistralParser(ToolParser):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__("[TOOL_CALLS]", names)

    def _after_marker(self) -> bool:
        first = self._skip(" \t\r\n")
        if first == "[":
            self._raw += "["
            self._text = self._text[1:]
            self._state = self._in_list
        elif first == "{":
            return self._begin()
        elif first:
            self._state = self._in_name
        return bool(first)

    def _in_list(self) -> bool:
        self._is_bare = False
        first = self._skip(" \t\r\n,")
        if first == "{":
            return self._begin()
        if first == "]":
            self._text = self._text[1:]
        if first:
            self._put("" if self._num_calls else self._raw)
            self._raw, self._state = "", self._outside
        return bool(first)

    def _in_name(self) -> bool:
        """`f[CALL_ID]id[ARGS]{...}`; also without the markers."""
        name, found, _ = self._text.partition("{")
        if not found:
            return False
        self._raw += name
        self._text = self._text[len(name) :]
        name = re.split(r"\[(?:CALL_ID|ARGS)\]", name)[0].strip()
        self._is_bare = True
        return self._begin(f'{{"name": {json.dumps(name)}, "arguments": ')

    def _after_call(self) -> bool:
        self._state = self._outside if self._is_bare else self._in_list
        return True


class Llama3Parser(ToolParser):
    """A JSON object without a marker is a call only if it names a tool of the request's."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__("<|python_tag|>", names)
        self._state = self._at_start
        self._has_marker = False

    def _at_start(self) -> bool:
        first = self._skip(" \t\r\n")
        if first == "{":
            return self._begin()
        if first:
            self._text, self._raw, self._state = self._raw + self._text, "", self._outside
        return bool(first)

    def _after_marker(self) -> bool:
        self._has_marker = True
        first = self._skip(" \t\r\n")
        if first == "{":
            return self._begin()
        if first:
            self._state = self._in_code
        return bool(first)

    def _in_code(self) -> bool:
        return False  # only the whole of it says what it is

    def _after_call(self) -> bool:
        first = self._skip(" \t\r\n;,")
        self._raw = ""
        if first == "{":
            return self._begin()
        if first:
            self._state = self._outside
        return bool(first)

    def _is_call(self, name: str) -> bool:
        return self._has_marker or name in self._names

    def finish(self) -> list[Piece]:
        if self._state == self._in_code and (delta := _call_in_code(self._text)):
            return [replace(delta, index=self._num_calls)]
        return super().finish()


def _call_in_code(code: str) -> CallDelta | None:
    """The call in `f.call(key="value")`; None: it is none, with literals alone."""
    if not _CALL.fullmatch(code.strip()):
        return None
    try:
        call = ast.parse(code.strip(), mode="eval").body
        assert isinstance(call, ast.Call)
        values = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        if call.args or None in values:
            return None
        return CallDelta(0, ast.unparse(call.func).removesuffix(".call"), json.dumps(values))
    except (AssertionError, SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None


_PARSERS: dict[ToolFormat, Callable[[Collection[str]], ToolParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
}


def new_parser(tool_format: ToolFormat, names: Collection[str]) -> ToolParser:
    return _PARSERS[tool_format](names)
