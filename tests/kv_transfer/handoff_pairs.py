"""Pairs of workers that hand over: in memory, or over UCX with the sender in its own process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from ctypes.util import find_library
from typing import Any

import pytest
from transfer_sides import FIRST, LAYOUT, NUM_BLOCKS, LocalSide, RemoteSide, Side, SideSpec

from baton.config.transfer import TransferConfig
from kv_transfer.layout import HandoffId
from kv_transfer.lease import Lease
from kv_transfer.transports.by_name import make_transport

HERE, THERE = list(range(100, 100 + NUM_BLOCKS)), list(range(200, 200 + NUM_BLOCKS))

AnySide = LocalSide | RemoteSide
MakePair = Callable[..., Awaitable[tuple[AnySide, AnySide]]]

needs_system_ucx = pytest.mark.skipif(
    find_library("ucp") is None,
    reason="the system's libucp.so.0 (Debian: libucx0) is not installed",
)

CONFIGS = {
    "memory": TransferConfig(transport="memory"),
    "ucx": TransferConfig(),
    "ucx-system": TransferConfig(ucx_library="system"),
}


def fits_here(config: TransferConfig) -> bool:
    """Two libucp in one process would take each other's symbols, and this one has the wheel's."""
    return config.ucx_library == "wheel"


def local(spec: SideSpec) -> LocalSide:
    return LocalSide(Side(spec, [make_transport(spec.config) for _ in range(spec.tp_size)]))


async def grant(
    sender: AnySide, receiver: AnySide, blocks: list[list[int]], request_id: str = "r"
) -> Lease:
    lease: Lease = await receiver.call("grant", request_id, await sender.call("ready"), blocks)
    return lease


async def pushed(
    sender: AnySide,
    receiver: AnySide,
    targets: list[int],
    sources: list[int],
    request_id: str = "r",
) -> tuple[Lease, HandoffId]:
    """A lease of the same blocks in both groups, opened and pushed but not finished."""
    lease = await grant(sender, receiver, [targets, targets], request_id)
    handoff: HandoffId = await sender.call("open", lease)
    for group in (0, 1):
        await sender.call("push", handoff, group, list(range(len(targets))), sources)
    return lease, handoff


def after(blocks: dict[int, int]) -> list[int]:
    """The receiver's seeds once its blocks (keys) hold the sender's blocks (values)."""
    return [HERE[blocks[b]] if b in blocks else THERE[b] for b in range(NUM_BLOCKS)]


async def hand_over(sender: AnySide, receiver: AnySide, layout: Any = LAYOUT) -> Any:
    """Blocks of all groups, scattered and in runs, over region borders, in two steps."""
    targets, sources = [3, 4, 5, 17, 7, 8, 9], [9, 10, 11, 1, 6, 7, 8]
    groups = range(len(layout.groups))
    lease = await grant(sender, receiver, [targets for _ in groups])
    handoff = await sender.call("open", lease)
    for part in (slice(0, 4), slice(4, 7)):
        for group in groups:
            ordinals = list(range(7))[part]
            await sender.call("push", handoff, group, ordinals, sources[part])
    receipt = await sender.call("finish", handoff)
    assert await receiver.call("wait_for", "admitted", "r") == ("admitted", "r", FIRST)
    assert await receiver.call("count_wrong_bytes", after(dict(zip(targets, sources)))) == 0
    assert await sender.call("count_wrong_bytes", HERE) == 0
    assert await sender.call("leftovers") == (0, 0, 0)
    assert await receiver.call("leftovers") == (0, 0, 0)
    return receipt
