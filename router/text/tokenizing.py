"""The tokenizer's threads and the line before them.

A request waits here before anything is known of its prompt, so the line is bounded in requests and
in bytes of their messages, and its tenants get equal parts of the threads, by bytes. At most it
holds `max_tokenizing_bytes`. Each thread may hold one more message whose caller has left, and its
tokens.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from baton.config.router import RouterConfig
from baton.errors import DeadlineError, OverloadedError
from router.placement.fairness import FairShare

T = TypeVar("T")


@dataclass(eq=False)
class _Job:
    tenant: str
    num_bytes: int
    work: Callable[[], Any]
    result: asyncio.Future[Any]
    in_line: bool = True

    def fail(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # its caller may be leaving


@dataclass(eq=False)
class _Line:
    """One tenant's requests: those that wait, oldest first, and how much they are with those that
    are worked on."""

    waiting: dict[_Job, None] = field(default_factory=dict)
    num_requests: int = 0
    num_bytes: int = 0


class Tokenizing:
    """Own the threads and the requests that wait for one. Tenants take turns; a tenant's oldest
    request is first."""

    def __init__(self, config: RouterConfig, num_threads: int = 1) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._num_idle = num_threads  # the executor's own queue never holds anything
        self._lines: dict[str, _Line] = {}
        self._fair = FairShare()  # by bytes
        self.num_requests = self.num_bytes = 0
        """Of those that wait or are worked on."""

    async def run(self, work: Callable[[], T], tenant: str, num_bytes: int, timeout_s: float) -> T:
        """Run `work` on a thread. A caller that leaves gives up its position in line.

        When the line is full the newest request of the tenant that has most of it is shed: raises
        OverloadedError, at once or while it waits. DeadlineError after `timeout_s`, and what `work`
        raises. A message larger than the line's bytes is taken when nobody else is there.
        """
        for shed in self._to_shed(tenant, num_bytes):
            shed.fail(self._overloaded())
            self._leave(shed)
        job = _Job(tenant, num_bytes, work, asyncio.get_running_loop().create_future())
        self._enter(job)
        self._start_next()
        try:
            async with asyncio.timeout(timeout_s):
                result: T = await job.result
                return result
        except TimeoutError:
            raise DeadlineError("the request's deadline has passed") from None
        finally:
            self._leave(job)

    # --- who is in line ------------------------------------------------------------------------

    def _enter(self, job: _Job) -> None:
        line = self._lines.setdefault(job.tenant, _Line())
        line.waiting[job] = None
        line.num_requests += 1
        line.num_bytes += job.num_bytes
        self.num_requests += 1
        self.num_bytes += job.num_bytes

    def _leave(self, job: _Job) -> None:
        if not job.in_line:
            return  # shed before
        job.in_line = False
        line = self._lines[job.tenant]
        line.waiting.pop(job, None)
        line.num_requests -= 1
        line.num_bytes -= job.num_bytes
        self.num_requests -= 1
        self.num_bytes -= job.num_bytes
        if not line.num_requests:
            del self._lines[job.tenant]

    def _to_shed(self, tenant: str, num_bytes: int) -> list[_Job]:
        """The request that makes room for a new one. Raises OverloadedError if that is the new one
        itself."""
        config, own = self._config, self._lines.get(tenant, _Line())
        num_left, bytes_left = self.num_requests, self.num_bytes
        shed: list[_Job] = []
        most = self._share(own.num_requests + 1, own.num_bytes + num_bytes)
        newest = self._newest_of_the_largest(above=most)
        while num_left and (
            num_left >= config.max_tokenizing
            or bytes_left + num_bytes > config.max_tokenizing_bytes
        ):
            job = next(newest, None)
            if job is None:
                raise self._overloaded()
            shed.append(job)
            num_left -= 1
            bytes_left -= job.num_bytes
        return shed

    def _newest_of_the_largest(self, above: float) -> Iterator[_Job]:
        """One after another, as if the ones before had left, while a tenant's share is `above`."""
        shares = [
            (-self._share(line.num_requests, line.num_bytes), number, line, reversed(line.waiting))
            for number, line in enumerate(self._lines.values())
        ]
        heapq.heapify(shares)
        gone = [(0, 0)] * len(shares)  # requests and bytes
        while shares and -shares[0][0] > above:
            _, number, line, waiting = heapq.heappop(shares)
            job = next(waiting, None)
            if job is None:
                continue  # the rest of it is worked on
            yield job
            num_gone, bytes_gone = gone[number]
            num_gone, bytes_gone = gone[number] = num_gone + 1, bytes_gone + job.num_bytes
            share = self._share(line.num_requests - num_gone, line.num_bytes - bytes_gone)
            heapq.heappush(shares, (-share, number, line, waiting))

    def _share(self, num_requests: int, num_bytes: int) -> float:
        """Of the line, by whichever bound is nearer."""
        config = self._config
        return max(num_requests / config.max_tokenizing, num_bytes / config.max_tokenizing_bytes)

    def _overloaded(self) -> OverloadedError:
        return OverloadedError(
            f"{self.num_requests} requests of {self.num_bytes} bytes wait to be tokenized",
            retry_after_s=self._config.overload_retry_s,
        )

    # --- whose turn it is ----------------------------------------------------------------------

    def _start_next(self) -> None:
        """Start work on idle threads. A thread is idle again when its work is done."""
        while self._num_idle and (job := self._next()) is not None:
            self._num_idle -= 1
            del self._lines[job.tenant].waiting[job]
            running = asyncio.get_running_loop().run_in_executor(self._threads, job.work)
            running.add_done_callback(partial(self._ended, job))

    def _next(self) -> _Job | None:
        """The oldest request of the tenant that has had least."""
        waiting = [tenant for tenant, line in self._lines.items() if line.waiting]
        if not waiting:
            self._fair.idle()
            return None
        tenant = min(waiting, key=self._fair.stamp)
        job = next(iter(self._lines[tenant].waiting))
        self._fair.served(self._fair.stamp(tenant))
        self._fair.charge(tenant, job.num_bytes)
        return job

    def _ended(self, job: _Job, running: asyncio.Future[Any]) -> None:
        self._num_idle += 1
        if running.cancelled():
            job.result.cancel()
        elif error := running.exception():
            job.fail(error)
        elif not job.result.done():  # else its caller has left
            job.result.set_result(running.result())
        self._start_next()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
