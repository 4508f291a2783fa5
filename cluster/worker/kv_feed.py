"""The blocks in a worker's prefix cache, sent to its followers: a snapshot, then changes.

The engine's thread takes the snapshot between two steps and passes it on like the steps' events. So
no change is lost between the snapshot and the first change. A change that the snapshot contains may
be sent again; applying it twice changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from engine.api import Engine
from engine.loop import EngineThread
from engine.request import BlocksRemovedEvent, BlocksStoredEvent, EngineEvent
from kv_transfer.block_hash import BlockHash

Chain = tuple[BlockHash | None, tuple[BlockHash, ...]]


@dataclass
class KvChange:
    """One message. `removed` applies first, then `stored`."""

    snapshot: bool = False
    removed: list[BlockHash] = field(default_factory=list)
    stored: list[Chain] = field(default_factory=list)


class Subscription:
    """One follower's changes. Ends when the follower is `max_pending` messages behind."""

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self._pending: deque[KvChange] = deque()
        self._wake = asyncio.Event()
        self.overflowed = False

    def push(self, change: KvChange) -> None:
        if self.overflowed:
            return
        if len(self._pending) >= self._max_pending:
            self.overflowed = True
            self._pending.clear()
        else:
            self._pending.append(change)
        self._wake.set()

    async def changes(self) -> AsyncIterator[KvChange]:
        """Yield the snapshot, then every change. Ends on overflow; then subscribe again."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.overflowed:
                return
            while self._pending:
                yield self._pending.popleft()


class KvFeed:
    """Own the subscriptions. Runs on the event loop."""

    def __init__(
        self, engine: EngineThread, loop: asyncio.AbstractEventLoop, max_pending: int = 1024
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._max_pending = max_pending
        self._subscriptions: set[Subscription] = set()

    def subscribe(self) -> Subscription:
        subscription = Subscription(self._max_pending)

        def begin(chains: list[Chain]) -> None:
            self._subscriptions.add(subscription)
            subscription.push(KvChange(snapshot=True, stored=chains))

        def take(engine: Engine) -> None:
            chains = engine.cached_chains()
            self._loop.call_soon_threadsafe(begin, chains)

        self._engine.post(take)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        # As if overflowed: it must stay silent even if its snapshot comes later.
        subscription.overflowed = True
        self._subscriptions.discard(subscription)

    def on_events(self, events: Iterable[EngineEvent]) -> None:
        """Pass on one step's changes in as few messages as their order allows."""
        if not self._subscriptions:
            return
        for change in changes_of(events):
            for subscription in list(self._subscriptions):
                subscription.push(change)
                if subscription.overflowed:
                    self._subscriptions.discard(subscription)


def changes_of(events: Iterable[EngineEvent]) -> list[KvChange]:
    """A step's block events as messages. A removal after a store begins a new message."""
    changes: list[KvChange] = []
    for event in events:
        if isinstance(event, BlocksRemovedEvent):
            if not changes or changes[-1].stored:
                changes.append(KvChange())
            changes[-1].removed.extend(event.hashes)
        elif isinstance(event, BlocksStoredEvent):
            if not changes:
                changes.append(KvChange())
            changes[-1].stored.append((event.parent, event.hashes))
    return changes
