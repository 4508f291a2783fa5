"""The decode role's tasks, and the one place that reports their unexpected errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class RoleTasks:
    """Own the tasks that take requests in. Report errors of these and of watched tasks."""

    def __init__(self, fail: Callable[[str, BaseException], None]) -> None:
        """`fail` ends the worker: it gets the error after which no state can be trusted."""
        self._fail = fail
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Number of spawned tasks that have not finished."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.watch(task)

    def watch(self, task: asyncio.Task[None]) -> None:
        """End the worker when an assertion fails in the task. The caller keeps the task."""
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, AssertionError):
            self._fail("the decode role", error)
        elif error is not None:
            log.error("a task of the decode role failed", exc_info=error)
