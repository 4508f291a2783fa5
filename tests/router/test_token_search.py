"""Special tokens are found a part of the text at a time, where a plain pattern finds them."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from router.text import token_search
from router.text.token_search import TokenSearch

TOKENS = ["<s>", "</s>", "<", "<|a|>", "<|ab|>", "<|ab", "[1]", "[12]", "|>", "a.b", "é" * 300]


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.sampled_from(TOKENS), unique=True),
    text=st.lists(st.sampled_from([*TOKENS, "a", "|", "[1", "/", "\n"]), max_size=30),
    chars_at_once=st.sampled_from([1, 2, 5, 64]),
)
def test_tokens_are_found_as_by_one_pattern_of_all(
    tokens: list[str], text: list[str], chars_at_once: int
) -> None:
    longest_first = sorted(tokens, key=len, reverse=True)
    plain = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
    usual, token_search._CHARS_AT_ONCE = token_search._CHARS_AT_ONCE, chars_at_once
    try:
        assert TokenSearch(tokens).split("".join(text)) == plain.split("".join(text))
    finally:
        token_search._CHARS_AT_ONCE = usual
