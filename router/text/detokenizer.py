"""Token ids of one answer to text, as they come, up to the first stop string.

What a model thinks before it answers holds no stop string: they apply to its answer.

What has been emitted after n tokens depends on those n tokens alone. A second router can therefore
push what a client has seen, drop the text, and continue.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tokenizers import Tokenizer

from router.text.reasoning import ReasoningSplitter
from router.text.token_bytes import TokenBytes


@dataclass(frozen=True)
class Scanned:
    text: str
    """What may be shown: certainly no part of a stop string."""
    stop: str | None
    """The stop string that ended the text; None while it continues."""


def _borders(pattern: str) -> list[int]:
    """For every prefix of `pattern`, the length of its longest proper prefix that is a suffix."""
    borders = [0] * len(pattern)
    matched = 0
    for position in range(1, len(pattern)):
        while matched and pattern[position] != pattern[matched]:
            matched = borders[matched - 1]
        if pattern[position] == pattern[matched]:
            matched += 1
        borders[position] = matched
    return borders


class StopScanner:
    """Hold back what could begin a stop string; what it lets through never depends on how the text
    was cut into pieces. Among several stop strings the one that ends first wins, then the longest.

    Knuth-Morris-Pratt on every stop string at once: amortised O(stop strings) a character.
    """

    def __init__(self, stop: Sequence[str], includes_stop: bool = False) -> None:
        self._includes_stop = includes_stop
        self._patterns = [(pattern, _borders(pattern)) for pattern in stop]
        self._matched = [0] * len(self._patterns)
        self._held = ""
        self._stopped: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> Scanned:
        """Take in text. With `may_stop` False, a stop string that ends in it is ignored; one that
        begins here and ends later still counts."""
        if self._stopped is not None:
            return Scanned("", self._stopped)
        if not self._patterns:
            return Scanned(text, None)
        seen = len(self._held)
        text = self._held + text
        for position in range(seen, len(text)):
            found = self._advance(text[position])
            if found is not None and may_stop:
                self._stopped, self._held = found, ""
                end = position + 1 - (0 if self._includes_stop else len(found))
                return Scanned(text[:end], found)
        cut = len(text) - max(self._matched)
        self._held = text[cut:]
        return Scanned(text[:cut], None)

    def finish(self) -> str:
        """What was held back, once it is certain that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        found: str | None = None
        for index, (pattern, borders) in enumerate(self._patterns):
            matched = self._matched[index]
            while matched and pattern[matched] != char:
                matched = borders[matched - 1]
            if pattern[matched] == char:
                matched += 1
            if matched == len(pattern):
                matched = borders[matched - 1]
                if found is None or len(pattern) > len(found):
                    found = pattern
            self._matched[index] = matched
        return found


REPLACEMENT = "\ufffd"


class TextDecoder(Protocol):
    """Token ids to whole characters."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str:
        """The rest; bytes that never became a character are U+FFFD."""


class BytesDecoder:
    """Concatenate the tokens' bytes and decode them as UTF-8: O(1) a token."""

    def __init__(self, token_bytes: TokenBytes, *, after_text: bool) -> None:
        """`after_text`: the tokens continue a text, so a space at their beginning is kept."""
        self._bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = bool(token_bytes.rules.strip_first_token) and not after_text
        self._strip_char, self._strip_left = token_bytes.rules.strip_start
        if after_text:
            self._strip_left = 0

    def push(self, token_id: int) -> str:
        if self._at_start and self._bytes.is_shown(token_id):
            self._at_start = False
            data = self._bytes.first(token_id)
        else:
            data = self._bytes[token_id]
        text = self._utf8.decode(data) if data else ""
        return self._strip(text) if self._strip_left and text else text

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if not text.startswith(self._strip_char):
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


class WindowDecoder:
    """For any other tokenizer: decode the last few tokens with and without the newest ones."""

    MAX_PENDING = 16  # a character never takes more tokens

    def __init__(self, tokenizer: Tokenizer, shows_special: bool = False) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=not shows_special)
        self._context: list[int] = []  # tokens whose text is out, there for the rules that join
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < self.MAX_PENDING:
            return ""
        if text:
            self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        text = self._new_text() if self._pending else ""
        self._pending = []
        return text

    def _new_text(self) -> str:
        before: str = self._decode(self._context) if self._context else ""
        whole: str = self._decode(self._context + self._pending)
        return whole[len(before) :]


class Detokenizer:
    """The text of one answer: whole characters only, and nothing of a stop string."""

    def __init__(
        self,
        decoder: TextDecoder,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        includes_stop: bool = False,
        thoughts: ReasoningSplitter | None = None,
    ) -> None:
        """`min_tokens`: no stop string, as no stop id, ends the text within that many tokens.
        `includes_stop`: the text ends with the stop string, not before it. `thoughts`: a fresh
        splitter, where a model may think first."""
        self._decoder = decoder
        self._scanner = StopScanner(stop, includes_stop)
        self._thoughts, self._unsplit = thoughts, ""
        self._min_tokens, self._num_tokens = min_tokens, 0

    def push(self, token_id: int) -> Scanned:
        """Return the text that the token makes readable. After a stop string, there is no more."""
        self._num_tokens += 1
        return self._scan(self._decoder.push(token_id))

    def finish(self) -> str:
        """Return what was held back. Called once, when no token follows."""
        shown = self._scan(self._decoder.finish()).text
        if self._thoughts is not None:
            shown += self._scan_answer(self._thoughts.finish().content).text
        return shown + self._scanner.finish()

    def _scan(self, text: str) -> Scanned:
        """Scan the answer. Thoughts, with what marks their ends, are shown as they are."""
        if self._thoughts is None:
            return self._scan_answer(text)
        answer = self._thoughts.push(text).content
        self._unsplit += text
        if self._thoughts.is_undecided:
            return Scanned("", None)
        before, self._unsplit = self._unsplit.removesuffix(answer), ""
        scanned = self._scan_answer(answer)
        return Scanned(before + scanned.text, scanned.stop)

    def _scan_answer(self, text: str) -> Scanned:
        return self._scanner.push(text, may_stop=self._num_tokens > self._min_tokens)
