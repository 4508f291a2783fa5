"""The tests' proxy before what clients of ordinary code connect to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

from tests.router.proxy import Proxy


@contextlib.contextmanager
def proxied(target: str) -> Iterator[tuple[str, Callable[[Callable[[Proxy], None]], object]]]:
    """An address that leads to `target`, and what does something to the proxy there."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    proxy = asyncio.run_coroutine_threadsafe(Proxy.to(target), loop).result(10)
    try:
        yield proxy.address, lambda action: loop.call_soon_threadsafe(action, proxy)
    finally:
        asyncio.run_coroutine_threadsafe(proxy.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
