"""A unit at the door: its share of the requests, and the life of its router.

1. The tokenizer is read from one of the unit's workers; then the unit has a router. 2. If the unit
serves another model from now on, that router is closed and another one made. 3. When the unit has
left the list, what runs continues to its end; then its router is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from router.router import Router

_POINTS = 2**53  # as many as floats between 0 and 1 can distinguish


@dataclass(frozen=True)
class UnitKey:
    """Which unit it is."""

    code: str
    control_address: str


class UnitRouter:
    """Own a unit's router. `make` makes one that was not started, however long that takes;
    `on_change` hears when `router` is another."""

    def __init__(
        self,
        key: UnitKey,
        make: Callable[[UnitKey], Awaitable[Router]],
        on_change: Callable[[], None],
    ) -> None:
        self.key = key
        self.share = 0.0
        self.router: Router | None = None
        """None: it has yet to be made."""
        self._make, self._on_change = make, on_change
        self._owned: Router | None = None  # until it is closed
        self._is_reading = False
        self._leaves = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, on_end: Callable[[asyncio.Task[None]], None]) -> None:
        self._task = asyncio.create_task(self._run(), name=f"unit {self.key.code}")
        self._task.add_done_callback(on_end)

    @property
    def has_left(self) -> bool:
        """It is in the list no more."""
        return self._leaves.is_set()

    def leave(self) -> None:
        """Let what runs continue to its end; nothing new comes."""
        self._leaves.set()
        if self._is_reading and self._task is not None:
            self._task.cancel()

    async def close(self, drain_s: float) -> None:
        """At once; what runs has `drain_s` to end."""
        self._leaves.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._owned is not None:
            await self._owned.close(drain_s)

    async def _run(self) -> None:
        while not self._leaves.is_set():
            self._is_reading = True
            router = self._owned = await self._make(self.key)
            self._is_reading = False
            await router.start()
            self._set(router)
            await _first(router.replaced, self._leaves)
            if not router.replaced.is_set():
                await router.run_out()
            self._set(None)
            await router.close()
            self._owned = None

    def _set(self, router: Router | None) -> None:
        self.router = router
        self._on_change()


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def point_of(request_id: str) -> float:
    """Where a request lies between 0 and 1; the same at every router."""
    digest = blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _POINTS / _POINTS


def drawn(request_id: str, shares: Sequence[float]) -> int:
    """The index of the unit that a request goes to, by the units' shares, the oldest first.

    The youngest has the points from 0 on: while its share grows, requests move to it, and none
    moves back.
    """
    point, last = point_of(request_id), 0
    for index in reversed(range(len(shares))):
        if shares[index] > 0:
            last = index
            if point < shares[index]:
                break
            point -= shares[index]
    return last
