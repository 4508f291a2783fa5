"""Text to token ids, remembering the segments between special tokens.

A tokenizer cuts a text at its special tokens first and treats what lies between on its own. So the
turns of a long conversation can be encoded once each: only the newest turn is work. Where that is
not exactly what the tokenizer would do (see `_is_segmentable`), texts are encoded whole.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict

from tokenizers import Tokenizer

CACHE_CHARS = 8 << 20


class _SegmentCache:
    """Least recently used segments go first; bounded by their characters. Thread-safe."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._chars = 0
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
            if key in self._entries or len(key[1]) > self._max_chars:
                return
            self._entries[key] = ids
            self._chars += len(key[1])
            while self._chars > self._max_chars:
                (_, oldest), _ = self._entries.popitem(last=False)
                self._chars -= len(oldest)


class SegmentEncoder:
    """Encode as the tokenizer does; in chat texts, marked special tokens stay text."""

    def __init__(self, tokenizer: Tokenizer, cache_chars: int = CACHE_CHARS) -> None:
        """Takes the tokenizer over: truncation and padding are switched off."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._literal = Tokenizer.from_str(tokenizer.to_str())
        self._literal.encode_special_tokens = True
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {token.content: token_id for token_id, token in added.items() if token.special}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._segmentable = _is_segmentable(tokenizer)
        self._cache = _SegmentCache(cache_chars)
        self._prefix, self._suffix = self._surroundings()

    @property
    def special_tokens(self) -> list[str]:
        return list(self._ids)

    def encode(self, text: str) -> list[int]:
        """A plain prompt, with the special tokens the tokenizer adds around one. Special tokens
        written in `text` are parsed: the caller's text is the prompt as it stands."""
        if not self._segmentable or self._prefix is None or self._suffix is None:
            return list(self._tokenizer.encode(text).ids)
        return [*self._prefix, *self._encode_segments(text, None), *self._suffix]

    def encode_rendered(self, text: str, mark: str | None) -> list[int]:
        """A rendered chat: nothing is added; what `mark` breaks is encoded as ordinary text."""
        if mark is None and not self._segmentable:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return self._encode_segments(text, mark)

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
            ids = list(tokenizer.encode(segment, add_special_tokens=False).ids)
            self._cache.put(key, ids)
        return ids

    def _surroundings(self) -> tuple[list[int] | None, list[int] | None]:
        """Ids that the tokenizer's post-processor puts before and after a single text."""
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
