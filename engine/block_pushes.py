"""What a step adds to a handoff: the blocks that a prefill-only request completes in it."""

from __future__ import annotations

from collections.abc import Iterator

from engine.live_request import Export, LiveRequest
from engine.request import BlockPush
from engine.windows import first_kept_block
from kv_transfer.layout import BlockId


def block_pushes(
    request: LiveRequest,
    export: Export,
    num_complete: int,
    windows: list[int | None],
    block_size: int,
) -> Iterator[BlockPush]:
    """Blocks from where the last push ended to the request's first `num_complete`: cached ones too,
    on the first push."""
    new = range(request.num_pushed_blocks, num_complete)
    for group, window in enumerate(windows):
        # The receiver has no block either for what the window has left by the prompt's end.
        kept = first_kept_block(window, request.num_tokens, block_size)
        first = max(new.start, kept)
        if first >= new.stop:
            continue
        ordinals = range(first - export.num_receiver_blocks, new.stop - export.num_receiver_blocks)
        table = request.blocks.tables[group][first : new.stop].tolist()
        yield BlockPush(
            export.handoff_id, group, tuple(ordinals), tuple(BlockId(block) for block in table)
        )
