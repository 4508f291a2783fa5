"""Which blocks a layer group that looks back a window only still needs."""

from __future__ import annotations


def first_live_block(window: int | None, position: int, block_size: int) -> int:
    """Index of the first block that a token at `position`, or any later one, still looks at."""
    if window is None:
        return 0
    return max(0, position - window + 1) // block_size


def first_kept_block(window: int | None, num_tokens: int, block_size: int) -> int:
    """Index of the first block that a worker needs of a prompt computed elsewhere.

    The next token looks at some; the same prompt, when it comes again, is computed from its last
    whole block on, and may look at one block more.
    """
    return first_live_block(window, (num_tokens - 1) // block_size * block_size, block_size)


def span_blocks(window: int, num_step_tokens: int, block_size: int) -> int:
    """Most blocks that `num_step_tokens` tokens in a row and their windows lie in."""
    return (window + num_step_tokens - 2) // block_size + 2
