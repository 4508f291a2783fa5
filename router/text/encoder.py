"""Text to token ids, remembering the segments between special tokens.

A tokenizer cuts a text at its special tokens first and treats what lies between on its own. So the
turns of a long conversation can be encoded once each: only the newest turn is work. Where that is
not exactly what the tokenizer would do (see `_is_segmentable`), texts are encoded whole.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections import OrderedDict

from tokenizers import AddedToken, Tokenizer

from router.text.token_search import TokenSearch

CACHE_BYTES = 64 << 20
STAND_IN = "\ufdef"  # a Unicode noncharacter: not part of a text that is meant for interchange
_ENTRY_BYTES, _ID_BYTES = 400, 36  # an entry without its text and ids; an integer in a list
_SHORT_CHARS = 4096  # of a text whose reading is not worth another thread


class _SegmentCache:
    """Own encoded segments, bounded by the memory they take: the least recently used go first.
    Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[tuple[bool, str], list[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[bool, str]) -> list[int] | None:
        with self._lock:
            ids = self._entries.get(key)
            if ids is not None:
                self._entries.move_to_end(key)
            return ids

    def put(self, key: tuple[bool, str], ids: list[int]) -> None:
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = ids
            self.num_bytes += _num_bytes(key[1], ids)
            while self.num_bytes > self._max_bytes:
                (_, oldest), its_ids = self._entries.popitem(last=False)
                self.num_bytes -= _num_bytes(oldest, its_ids)


def _num_bytes(segment: str, ids: list[int]) -> int:
    return _ENTRY_BYTES + sys.getsizeof(segment) + _ID_BYTES * len(ids)


def _encoded(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """`Tokenizer.encode` holds the interpreter's lock, for a text of 1 MB for seconds. A batch does
    not, and takes a third of the time; but it wakes a thread, for which a short text does not pay.
    """
    if len(text) <= _SHORT_CHARS:
        encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    else:
        encoding = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    ids: list[int] = encoding.ids  # a new one each time
    return ids


class _StandIns:
    """A tokenizer that reads a special token only where its stand-in is in its place."""

    def __init__(self, literal: Tokenizer, added: dict[int, AddedToken]) -> None:
        self._tokenizer = Tokenizer.from_str(literal.to_str())
        self._tokenizer.encode_special_tokens = True
        self._names: dict[str, str] = {}
        self._ids: dict[int, int] = {}  # a stand-in's to its token's
        for token_id, token in added.items():
            if token.special:
                name = self._names[token.content] = f"{STAND_IN}{token_id}{STAND_IN}"
                self._tokenizer.add_tokens([_stand_in(token, name)])
                stand_in = self._tokenizer.token_to_id(name)
                assert stand_in is not None, name
                self._ids[stand_in] = token_id

    def encode(self, pieces: list[str]) -> list[int]:
        """Encode a text that was cut at its special tokens; every second piece is one."""
        names = [self._names[piece] if i % 2 else piece for i, piece in enumerate(pieces)]
        ids = _encoded(self._tokenizer, "".join(names))
        return [self._ids.get(token_id, token_id) for token_id in ids]


def _stand_in(token: AddedToken, name: str) -> AddedToken:
    """Make a stand-in, which takes the spaces that the token takes."""
    lstrip, rstrip = token.lstrip, token.rstrip
    return AddedToken(name, lstrip=lstrip, rstrip=rstrip, normalized=False, special=False)


class SegmentEncoder:
    """Encode as the tokenizer does; in chat texts, marked special tokens stay text."""

    def __init__(self, tokenizer: Tokenizer, cache_bytes: int = CACHE_BYTES) -> None:
        """Takes the tokenizer over: truncation and padding are switched off."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._literal = Tokenizer.from_str(tokenizer.to_str())
        self._literal.encode_special_tokens = True
        self._added = tokenizer.get_added_tokens_decoder()
        self._ids = {t.content: token_id for token_id, t in self._added.items() if t.special}
        self._special = TokenSearch(self._ids)
        self._segmentable = _is_segmentable(tokenizer)
        self._cache = _SegmentCache(cache_bytes)
        self._prefix, self._suffix = self._surroundings()

    @property
    def special_tokens(self) -> list[str]:
        return list(self._ids)

    def encode(self, text: str) -> list[int]:
        """Encode a plain prompt, with the special tokens that the tokenizer adds around one. Those
        written in `text` are parsed: the caller's text is the prompt as it stands."""
        if not self._segmentable or self._prefix is None or self._suffix is None:
            return _encoded(self._tokenizer, text, add_special_tokens=True)
        return [*self._prefix, *self._encode_segments(text, None), *self._suffix]

    def encode_rendered(self, text: str, mark: str | None) -> list[int]:
        """Encode a rendered chat. Nothing is added; what `mark` breaks is ordinary text."""
        if mark is None and not self._segmentable:
            return _encoded(self._tokenizer, text)
        if self._segmentable or STAND_IN in text:  # nobody means a stand-in
            return self._encode_segments(text, mark)
        assert mark is not None
        pieces = self._special.split(text)
        pieces[::2] = [piece.replace(mark, "") for piece in pieces[::2]]
        return self._stand_ins.encode(pieces)

    @functools.cached_property
    def _stand_ins(self) -> _StandIns:
        return _StandIns(self._literal, self._added)

    def _encode_segments(self, text: str, mark: str | None) -> list[int]:
        ids: list[int] = []
        for position, segment in enumerate(self._special.split(text)):
            if position % 2:
                ids.append(self._ids[segment])
            elif segment:
                ids += self._encode_segment(segment, mark)
        return ids

    def _encode_segment(self, segment: str, mark: str | None) -> list[int]:
        literal = mark is not None and mark in segment
        if literal:
            assert mark is not None
            segment = segment.replace(mark, "")
        key = (literal, segment)
        ids = self._cache.get(key)
        if ids is None:
            tokenizer = self._literal if literal else self._tokenizer
            ids = _encoded(tokenizer, segment)
            self._cache.put(key, ids)
        return ids

    def _surroundings(self) -> tuple[list[int] | None, list[int] | None]:
        """Return the ids that the tokenizer's post-processor puts around a single text."""
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a").ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return None, None


def _is_segmentable(tokenizer: Tokenizer) -> bool:
    """Whether encoding the segments between special tokens one by one gives the same ids."""
    spec = json.loads(tokenizer.to_str())
    for token in spec.get("added_tokens") or []:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            return False
        if token["special"] and token["normalized"] and spec["normalizer"] is not None:
            return False
        if not token["special"] and not token["normalized"]:
            return False  # may overlap a special token, and then the longer one wins
    return '"prepend_scheme": "first"' not in json.dumps(spec["pre_tokenizer"])
