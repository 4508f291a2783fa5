"""How other threads reach an event loop that may have closed, or not begun."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator


class LoopDoor:
    """Passes calls on to a loop for as long as it runs `open`; drops the others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """On the loop. It cannot close inside, and nothing is passed on to it afterwards."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._loop = loop
        try:
            yield
        finally:
            with self._lock:
                self._loop = None

    def call(self, function: Callable[[], object]) -> bool:
        """From any thread: run `function` on the loop; False when it is not open."""
        with self._lock:
            if self._loop is None:
                return False
            self._loop.call_soon_threadsafe(function)
            return True
