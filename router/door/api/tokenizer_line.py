"""Requests that are not known to the router yet: their prompts are still being tokenized.

They wait before anything is known of their prompts, so the line is bounded in requests and in bytes
of their messages. Tenants get equal parts of the threads, by bytes.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.config.router import AdmissionConfig
from baton.errors import DeadlineError
from router.placement.fairness import FairLine
from router.request.client_request import Key

T = TypeVar("T")


class PendingRequests:
    """Own the limits of requests that arrive, so that each can be aborted by its name."""

    def __init__(self) -> None:
        self._limits: defaultdict[Key, set[asyncio.Timeout]] = defaultdict(set)

    async def run(self, key: Key, work: Awaitable[T]) -> T | None:
        """Return or raise what `work` does. None when `abort` came first, even if only just."""
        limit = asyncio.timeout(None)
        self._limits[key].add(limit)
        try:
            async with limit:
                result = await work
            return result if limit.when() is None else None
        except TimeoutError:
            if not limit.expired():
                raise
            return None
        finally:
            self._limits[key].discard(limit)
            if not self._limits[key]:
                del self._limits[key]

    def abort(self, key: Key) -> bool:
        """End what arrives under this name; False when nothing does."""
        limits = self._limits.pop(key, set())
        for limit in limits:
            limit.reschedule(0.0)
        return bool(limits)

    def __len__(self) -> int:
        return sum(map(len, self._limits.values()))


class TokenizerLine:
    """Own the tokenizer's thread and the line before it."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self.line = FairLine(
            "tokenized",
            at_once=1,
            max_requests=config.max_tokenizing,
            retry_after_s=config.overload_retry_s,
            max_bytes=config.max_tokenizing_bytes,
        )

    async def run(self, work: Callable[[], T], tenant: str, num_bytes: int, timeout_s: float) -> T:
        """Run `work` on the thread. A caller that leaves gives up its position in line; work that
        has begun is finished first.

        Raises OverloadedError when it is shed, DeadlineError after `timeout_s`, and what `work`
        raises.
        """
        try:
            async with asyncio.timeout(timeout_s):
                turn = await self.line.enter(tenant, num_bytes)
                running = asyncio.get_running_loop().run_in_executor(self._threads, work)

                def ended(running: asyncio.Future[T]) -> None:
                    if not running.cancelled():
                        running.exception()  # its caller may have left
                    self.line.leave(turn)

                running.add_done_callback(ended)
                await asyncio.wait({running})
        except TimeoutError:
            raise DeadlineError("the request's deadline has passed") from None
        return running.result()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
