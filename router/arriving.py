"""Requests that are not known to the router yet: their prompts are still being tokenized."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

Key = tuple[str, str]  # (tenant, request id), as the client named it


class Arriving:
    """Own the tasks of requests that arrive, so that each can be aborted by its name."""

    def __init__(self) -> None:
        self._tasks: dict[Key, set[asyncio.Task[Any]]] = {}

    async def run(self, key: Key, work: Coroutine[Any, Any, T]) -> T | None:
        """Return or raise what `work` does. None when `abort` came first, even if only just."""
        task = asyncio.create_task(work)
        self._tasks.setdefault(key, set()).add(task)
        try:
            result = await task
        except asyncio.CancelledError:
            if self._holds(key, task):
                raise  # not by `abort`: its client has left
            return None
        else:
            return result if self._holds(key, task) else None
        finally:
            self._remove(key, task)

    def abort(self, key: Key) -> bool:
        """End what arrives under this name; False when nothing does."""
        tasks = self._tasks.pop(key, set())
        for task in tasks:
            task.cancel()
        return bool(tasks)

    def __len__(self) -> int:
        return sum(map(len, self._tasks.values()))

    def _holds(self, key: Key, task: asyncio.Task[Any]) -> bool:
        return task in self._tasks.get(key, ())

    def _remove(self, key: Key, task: asyncio.Task[Any]) -> None:
        tasks = self._tasks.get(key, set())
        tasks.discard(task)
        if not tasks:
            self._tasks.pop(key, None)
