"""An answer to a chat, told apart while it streams: thoughts, text and calls, for both doors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from router.text.reasoning import Split
from router.text.text_model import TextModel
from router.text.tools import CallDelta, Piece, new_parser

_ID_CHARS = {"mistral": 9}  # its templates refuse others


@dataclass(frozen=True)
class Thought:
    text: str


Said = Thought | Piece


class AnswerReader:
    """Own what was not decided yet. What has come out after a text does not depend on how the text
    was cut."""

    def __init__(
        self, model: TextModel, prompt: Sequence[int], tools: Collection[str], key: str
    ) -> None:
        """`tools`: names of those that the answer may call. `key`: the ids of its calls follow from
        it, so that they are the same for a client that comes back."""
        self._format, self._key, self._num_calls = model.tool_format, key, 0
        self._splitter = model.new_splitter(prompt)
        self._parser = new_parser(self._format, tools) if tools and self._format else None

    @property
    def is_plain(self) -> bool:
        """The answer is all that the model writes."""
        return self._splitter is None and self._parser is None

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str) -> list[Said]:
        return self._answer(text) if self._splitter is None else self._of(self._splitter.push(text))

    def finish(self) -> list[Said]:
        """What was held back, once it is certain that nothing follows."""
        said = [] if self._splitter is None else self._of(self._splitter.finish())
        return said + ([] if self._parser is None else self._named(self._parser.finish()))

    def _of(self, split: Split) -> list[Said]:
        thoughts: list[Said] = [Thought(split.reasoning)] if split.reasoning else []
        return thoughts + self._answer(split.content)

    def _answer(self, text: str) -> list[Said]:
        if not text:
            return []
        return [text] if self._parser is None else self._named(self._parser.push(text))

    def _named(self, pieces: Iterable[Piece]) -> list[Said]:
        """Give each call's first piece an id."""
        made = list[Said]()
        for piece in pieces:
            if isinstance(piece, CallDelta) and piece.name is not None:
                self._num_calls += 1
                piece = replace(piece, call_id=self._call_id(piece.index))
            made.append(piece)
        return made

    def _call_id(self, index: int) -> str:
        digest = blake2b(f"{self._key}/{index}".encode(), digest_size=12).hexdigest()
        length = _ID_CHARS.get(self._format or "")
        return f"call_{digest}" if length is None else digest[:length]
