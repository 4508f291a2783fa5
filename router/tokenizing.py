"""The tokenizer's threads and the line before them.

A request waits here before anything is known of its prompt, so the line is bounded in requests and
in bytes of their messages. At the worst it holds `max_tokenizing_bytes`, and each thread one
message more whose caller has left, with the tokens it is made into.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.errors import DeadlineError, OverloadedError
from router.config import RouterConfig

T = TypeVar("T")


class Tokenizing:
    """Own the threads, and who waits for one: first come, first served."""

    def __init__(self, config: RouterConfig, num_threads: int = 1) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._idle = asyncio.Semaphore(num_threads)  # the executor's own queue never holds anything
        self.num_requests = self.num_bytes = 0
        """Of those that wait or are worked on."""

    async def run(self, work: Callable[[], T], num_bytes: int, timeout_s: float) -> T:
        """What `work` gives on a thread; a caller that leaves takes its place in line with it.

        Raises OverloadedError when the line is full, DeadlineError after `timeout_s`, and what
        `work` raises. A message larger than the line's bytes is taken when nobody else is there.
        """
        config = self._config
        too_large = self.num_bytes + num_bytes > config.max_tokenizing_bytes
        if self.num_requests and (too_large or self.num_requests >= config.max_tokenizing):
            raise OverloadedError(
                f"{self.num_requests} requests of {self.num_bytes} bytes wait to be tokenized",
                retry_after_s=config.overload_retry_s,
            )
        self.num_requests += 1
        self.num_bytes += num_bytes
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.acquire()
                return await asyncio.shield(self._start(work))
        except TimeoutError:
            raise DeadlineError("the request's deadline has passed") from None
        finally:
            self.num_requests -= 1
            self.num_bytes -= num_bytes

    def _start(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """On a thread that is idle. It is so again when the work is done, whoever still waits."""
        job = asyncio.get_running_loop().run_in_executor(self._threads, work)

        def ended(_: asyncio.Future[T]) -> None:
            self._idle.release()
            if not job.cancelled():
                job.exception()  # its caller may have left

        job.add_done_callback(ended)
        return job

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
