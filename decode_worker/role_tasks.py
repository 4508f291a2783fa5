"""The decode role's tasks: an error that nothing in them understood is told of once, here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class RoleTasks:
    """Own the tasks that take requests in; tells of what failed in these and in others' too."""

    def __init__(self, fail: Callable[[str, BaseException], None]) -> None:
        """`fail` is told of an error that leaves nothing here to rely on."""
        self._fail = fail
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Of those that were spawned and are not over."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.watch(task)

    def watch(self, task: asyncio.Task[None]) -> None:
        """An assertion that fails in it ends the worker; it stays its caller's."""
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, AssertionError):
            self._fail("the decode role", error)
        elif error is not None:
            log.error("a task of the decode role failed", exc_info=error)
