"""An answer to a chat, told apart while it streams: thoughts, text and calls, for both doors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from router.text.reasoning import Split
from router.text.text_model import TextModel
from router.text.tools import Piece, new_parser

_ID_CHARS = {"mistral": 9}  # its templates refuse others


@dataclass(frozen=True)
class Thought:
    text: str


Said = Thought | Piece


class AnswerReader:
    """Own what was not decided yet. What it returns does not depend on how the text was cut."""

    def __init__(
        self, model: TextModel, prompt: Sequence[int], tools: Collection[str], key: str, must: bool
    ) -> None:
        """`tools`: names of those that the answer may call. `key`: the ids of its calls follow from
        it, so that they are the same for a client that comes back. `must`: it calls one, so text is
        a call that was cut off, and is left out."""
        self._format, self._key, self._must = model.tool_format, key, must
        self._has_call = False
        self._splitter = model.new_splitter(prompt)
        self._parser = new_parser(self._format, tools) if tools and self._format else None
        self.is_plain = self._splitter is None and self._parser is None
        """Whether the answer is all that the model writes."""

    @property
    def has_called(self) -> bool:
        """Whether it holds a call, and none that is cut off here."""
        return self._has_call and not (self._parser and self._parser.is_in_call)

    def push(self, text: str) -> list[Said]:
        return self._said(Split("", text) if self._splitter is None else self._splitter.push(text))

    def finish(self) -> list[Said]:
        """Return what was held back, once it is certain that nothing follows."""
        said = [] if self._splitter is None else self._said(self._splitter.finish())
        held = [] if self._parser is None else self._parser.finish()
        return said + self._named(held)

    def _said(self, split: Split) -> list[Said]:
        pieces: list[Piece] = [split.content] if split.content else []
        if pieces and self._parser is not None:
            pieces = self._parser.push(split.content)
        thoughts: list[Said] = [Thought(split.reasoning)] if split.reasoning else []
        return thoughts + self._named(pieces)

    def _named(self, pieces: Sequence[Piece]) -> list[Said]:
        return [self._with_id(each) for each in pieces if not (self._must and type(each) is str)]

    def _with_id(self, piece: Piece) -> Piece:
        """Give a call's first piece an id."""
        if isinstance(piece, str) or piece.name is None:
            return piece
        self._has_call = True
        digest = blake2b(f"{self._key}/{piece.index}".encode(), digest_size=12).hexdigest()
        length = _ID_CHARS.get(self._format or "")
        return replace(piece, call_id=digest[:length] if length else f"call_{digest}")
