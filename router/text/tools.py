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
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

ToolFormat = Literal["hermes", "llama3", "mistral"]

MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
}
_ARGUMENTS = ("arguments", "parameters")
_HERMES_MARKER = re.compile("</?tool_call>")
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
    """A further piece of a call. The first one of each call has its name, and later an id."""

    index: int
    name: str | None
    arguments: str
    call_id: str = ""


Piece = str | CallDelta


def _whole(text: str) -> str:
    """Put U+FFFD for each half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_HALF, _ESCAPED = r"\\u[dD][89a-fA-F]\w\w", r"\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w"
_UNITS = re.compile(rf"{_ESCAPED}|({_HALF})|\\?.", re.DOTALL)
_MAY_BE_HALF = re.compile(r"\\(u\w{0,3}|u[dD][89abAB]\w\w(\\(u([dD]([c-fC-F]\w?)?)?)?)?)?")


def _whole_escapes(json_text: str) -> str:
    """Put U+FFFD for each half of a surrogate pair that JSON spells as an escape."""
    return _UNITS.sub(lambda unit: r"\ufffd" if unit[1] else unit[0], json_text)


T = TypeVar("T")
_Reader = Generator[None, str, T]
"""Is sent character after character, and returns what they are."""


def _mark() -> _Reader[str]:
    """Return the next character that is no white space."""
    while (char := (yield)) in " \t\r\n":
        pass
    return char


class _Call:
    """Read `{"name": "f", "arguments": {...}}` character by character."""

    def __init__(self, *, is_bare: bool = False) -> None:
        """`is_bare`: the call ends with its arguments, without a bracket of its own."""
        self.name: str | None = None
        self.is_over = self._is_whole = False
        self._is_bare = is_bare
        self._arguments: list[str] | None = None  # not taken yet; None: none have come
        self._shows = False  # what is read belongs to the arguments
        self._escape = ""  # of the arguments, until it is known whether it is half of a pair
        self._reader = self._read()
        next(self._reader)

    def take(self) -> str:
        """Return the arguments since the last time. A call without any has an empty object."""
        if self._arguments is None:
            return "{}" if self._is_whole else ""
        taken, self._arguments = "".join(self._arguments), []
        return taken

    def push(self, char: str) -> None:
        try:
            self._reader.send(char)
        except StopIteration as end:
            self.is_over, self._is_whole = True, end.value
        except ValueError:  # a text that is no JSON
            self.is_over = True

    def _read(self) -> _Reader[bool]:
        """Return whether it is an object."""
        if (yield from _mark()) != "{":
            return False
        while (mark := (yield from _mark())) == '"':
            key = yield from self._text()
            if (yield from _mark()) != ":":
                return False
            if (mark := (yield from self._value(key))) != ",":
                break
        return mark == "}"

    def _value(self, key: str) -> _Reader[str]:
        """Return what follows the value. Of two names or arguments, the first is the call's."""
        first = yield from _mark()
        is_argument = key in _ARGUMENTS and self._arguments is None
        if first == '"':
            text = yield from self._text()
            if key == "name" and self.name is None:
                self.name = text
            elif is_argument and text:
                self._arguments = [_whole_escapes(text)]  # JSON within a text
        elif first in "{[":
            if is_argument:
                self._arguments, self._shows = [first], True
            yield from self._nested()
            self._shows = False
            if self._is_bare:
                return "}"
        else:
            while (char := (yield)) not in ",}":
                pass
            return char
        return (yield from _mark())

    def _nested(self) -> _Reader[None]:
        """Read an object or a list whose first bracket has been read."""
        depth = 1
        while depth:
            char = yield from self._char()
            if char == '"':
                yield from self._quoted()
            depth += (char in "{[") - (char in "}]")

    def _text(self) -> _Reader[str]:
        """Return a text whose first quote has been read. Raises ValueError if it is no JSON."""
        quoted = yield from self._quoted()
        return _whole(json.loads(f'"{quoted}'))

    def _quoted(self) -> _Reader[str]:
        chars = list[str]()
        while chars[-1:] != ['"']:
            chars.append((yield from self._char()))
            if chars[-1] == "\\":
                chars[-1] += yield from self._char()
        return "".join(chars)

    def _char(self) -> _Reader[str]:
        char = yield
        if self._shows and self._arguments is not None:
            self._escape += char
            while self._escape and not _MAY_BE_HALF.fullmatch(self._escape):
                unit = _UNITS.match(self._escape)
                assert unit is not None, "any character is one"
                self._arguments.append(r"\ufffd" if unit[1] else unit[0])
                self._escape = self._escape[unit.end() :]
        return char


class ToolParser(ABC):
    """Own what was not decided yet of one answer's text."""

    def __init__(self, marker: str, names: Collection[str]) -> None:
        """`names`: of the tools that the request has."""
        self._marker, self._names = marker, names
        self._text = ""  # not looked at yet
        self._raw = ""  # of the call that is read: text, if it turns out to be none
        self._out: list[Piece] = []
        self._call = _Call()
        self.is_in_call = False  # its name is out, and it goes on
        self._num_calls = 0
        self._state: Callable[[], bool] = self._outside

    def push(self, text: str) -> list[Piece]:
        self._text, self._out = self._text + text, []
        while self._text and self._state():
            pass
        return self._out

    def finish(self) -> list[Piece]:
        """Return what was held back, once it is certain that nothing follows."""
        self._out = []
        rest = self._raw + self._text
        is_between = self._num_calls and self._state in self._between
        if not self.is_in_call and not is_between and (rest.strip() or not self._num_calls):
            self._put(rest)
        return self._out

    @property
    def _between(self) -> tuple[Callable[[], bool], ...]:
        """States after a call: what is left then is no text."""
        return (self._after_call,)

    # States take from `_text`, and return whether the next one has something to do.

    def _outside(self) -> bool:
        """Put out text up to the marker. White space before it, and after a call, is nobody's."""
        before, found, after = self._text.partition(self._marker)
        shown = before if found else before[: -_begun(before, self._marker) or None]
        stripped = shown.rstrip()
        held = "" if found else before[len(stripped) :]
        self._put(stripped)
        if found:
            self._raw = before[len(stripped) :] + self._marker
            self._text, self._state = after, self._after_marker
        else:
            self._text = held
        return bool(found)

    @abstractmethod
    def _after_marker(self) -> bool: ...

    @abstractmethod
    def _after_call(self) -> bool: ...

    def _skip(self, chars: str) -> str:
        """Step over what stands before the next part. Return the character after it, or none."""
        rest = self._text.lstrip(chars)
        self._raw += self._text[: len(self._text) - len(rest)]
        self._text = rest
        return rest[:1]

    def _begin(self, head: str = "") -> bool:
        """Begin a call; `head` is read before the model's own text."""
        self._call, self.is_in_call = _Call(is_bare=self._is_bare), False
        for char in head:
            self._call.push(char)
        self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        call, position = self._call, 0
        for char in self._text:
            call.push(char)
            position += 1
            if call.is_over:
                break
        self._raw += self._text[:position]
        self._text = self._text[position:]
        self._show()
        if call.is_over:
            self._end_call()
        return call.is_over

    _is_bare = False
    """Whether the model writes the arguments alone."""

    def _is_call(self, name: str) -> bool:
        return True

    def _show(self) -> None:
        call = self._call
        if call.name is None:
            return
        if not self.is_in_call and not self._is_call(call.name):
            call.is_over = True
            return
        arguments = call.take()
        if not self.is_in_call or arguments:
            name = None if self.is_in_call else call.name
            self._out.append(CallDelta(self._num_calls, name, arguments))
        self.is_in_call, self._raw = True, ""

    def _end_call(self) -> None:
        if self.is_in_call:
            self._num_calls += 1
            self._state = self._after_call
        else:
            self._put(self._raw)
            self._state = self._outside
        self.is_in_call, self._raw = False, ""

    def _put(self, text: str) -> None:
        if text and self._out and isinstance(self._out[-1], str):
            self._out[-1] += text
        elif text:
            self._out.append(text)


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
        """Skip up to the closing marker, or another call's, with what a broken call leaves."""
        found = _HERMES_MARKER.search(self._text)
        if found is None:
            self._text = self._text[1 - len("</tool_call>") :]
            return False
        is_next = found[0] == self._marker
        self._text = self._text[found.start() if is_next else found.end() :]
        self._state = self._outside
        return True


class MistralParser(ToolParser):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__("[TOOL_CALLS]", names)

    def _after_marker(self) -> bool:
        first, self._is_bare = self._skip(" \t\r\n"), False
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
        first = self._skip(" \t\r\n,")
        if self._num_calls:
            self._raw = ""
        if first == "{":
            return self._begin()
        if first == "]":
            self._text = self._text[1:]
        if first:
            self._put(self._raw)
            self._raw, self._state = "", self._outside
        return bool(first)

    @property
    def _between(self) -> tuple[Callable[[], bool], ...]:
        return (self._after_call, self._in_list)

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
    """Return the call in `f.call(key="value")`; None: it is no call with literals alone."""
    if not _CALL.fullmatch(code.strip()):
        return None
    try:
        call = ast.parse(code.strip(), mode="eval").body
        assert isinstance(call, ast.Call)
        values = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        if call.args or None in values:
            return None
        arguments = _whole_escapes(json.dumps(values, allow_nan=False))
        return CallDelta(0, ast.unparse(call.func).removesuffix(".call"), arguments)
    except (AssertionError, SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None


_PARSERS: dict[ToolFormat, Callable[[Collection[str]], ToolParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
}


def new_parser(tool_format: ToolFormat, names: Collection[str]) -> ToolParser:
    return _PARSERS[tool_format](names)
