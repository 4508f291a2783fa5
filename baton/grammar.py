"""Grammars that answers follow: what routers and workers agree on.

Workers refuse what would cost too much, routers only what cannot be compiled. The library counts
work, not time, so a refusal does not depend on the machine (`docs/decisions/structured-output.md`
has times).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import llguidance

MAX_GRAMMAR_BYTES = 256 << 10
_MAX_PROBLEM_CHARS = 300
_STACK_BYTES = 128 << 20
"""Stack of a compile; only what it touches takes memory. A chain of `MAX_RULES`
(`baton/grammar_chains.py`) touches 3 to 4 MiB, and the worst that was found, nested `items`, 40."""

BROKEN_GRAMMAR = "its constraint cannot be followed"
"""The beginning of the `error` of a request whose grammar failed while it ran. It is the request's
own fault, which another worker would find too."""


def parser_limits() -> llguidance.LLParserLimits:
    import llguidance  # not loaded by a process that sees no constraint

    return llguidance.LLParserLimits(
        initial_lexer_fuel=300_000,
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=20_000,  # of 1 to 2 kB each
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def try_out(
    matcher: llguidance.LLMatcher, ends: Collection[int], num_tokens: int, first: Sequence[int] = ()
) -> str:
    """Return what fails within a grammar's first tokens, or "". The tokens are those of `first`
    where they are allowed, else the lowest allowed."""
    for _ in range(num_tokens):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return short(matcher.get_error())
        words = ((8 * index, byte) for index, byte in enumerate(mask) if byte)
        allowed = (at + bit for at, byte in words for bit in range(8) if byte >> bit & 1)
        preferred = (each for each in first if mask[each >> 3] >> (each & 7) & 1)
        token = next((each for each in chain(preferred, allowed) if each not in ends), None)
        if token is None:
            return "" if any(mask) else "no token of the vocabulary continues the output"
        matcher.consume_token(token)
    return ""


T = TypeVar("T")
_starting = threading.Lock()


def on_deep_stack(call: Callable[[], T]) -> T:
    """Make a call on a thread of its own with room to recurse, and return or raise what it does."""
    with ThreadPoolExecutor(1, thread_name_prefix="grammar") as threads:
        with _starting:  # the size is the process's, for whichever thread starts next
            before = threading.stack_size(_STACK_BYTES)
            try:
                done = threads.submit(call)
            finally:
                threading.stack_size(before)
        return done.result()


def short(problem: str) -> str:
    """Return the library's words for what is wrong with a grammar, in one line."""
    return " ".join(problem.removesuffix("<non-verbose/>").split())[:_MAX_PROBLEM_CHARS]
