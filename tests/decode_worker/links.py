"""Workers of this process, with a router's session and a router before them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from baton.fleet import Role
from cluster.worker.worker import Worker
from tests.cluster.conftest import DecodeLink, MiniRouter, Pair, nothing_held, running_worker


@contextlib.asynccontextmanager
async def linked(worker: Worker, router_id: str = "router-a/1") -> AsyncIterator[DecodeLink]:
    """A router's session with a decode worker."""
    link = await DecodeLink(worker.address, router_id).open()
    yield link
    await link.close()


@contextlib.asynccontextmanager
async def routed(prefill: Worker, decode: Worker) -> AsyncIterator[Pair]:
    """Two running workers with a router before them."""
    async with linked(decode) as link:
        router = MiniRouter(prefill.address, link)
        yield Pair(prefill, decode, link, router)
        await router.close()


@contextlib.asynccontextmanager
async def paired(
    prefill_options: dict[str, Any] | None = None, decode_options: dict[str, Any] | None = None
) -> AsyncIterator[Pair]:
    """A worker of each role with a router before them; at the end neither holds anything."""
    async with (
        running_worker("prefill-0", Role.PREFILL, **prefill_options or {}) as prefill,
        running_worker("decode-0", Role.DECODE, **decode_options or {}) as decode,
        routed(prefill, decode) as pair,
    ):
        yield pair
        await nothing_held(prefill, decode)
