"""A unit: its share of the requests, its tokenizer, and the life of its router.

1. The tokenizer is read from one of the unit's workers; then the unit has a router.
2. If the unit serves another model from now on, that router is closed and another one made.
3. When the unit has left the list, what runs continues to its end; then its router is closed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import grpc.aio

from baton.errors import ConfigError, UnavailableError
from baton.link.frames import LinkError, Method, link_name
from baton.link.router_end import Link
from baton.model_folder import TEXT_FILES
from baton.pacing import Backoff
from baton.v1 import control_pb2, worker_pb2
from router.fleet.registry import RegistryAccess
from router.text import TextModel
from router.units.router import Router

log = logging.getLogger(__name__)

READ_WITHIN_S = 60.0
_FLEET_WITHIN_S = 5.0
_FAULTS = (grpc.aio.AioRpcError, LinkError, UnavailableError, ConfigError, OSError, TimeoutError)


async def read_tokenizer(registry: RegistryAccess) -> tuple[TextModel, bytes]:
    """Read a unit's tokenizer from any live worker; try again until one has it. Returns it with the
    worker's `model_fingerprint`."""
    links = registry.config.links
    backoff = Backoff(links.reconnect_min_s, links.reconnect_max_s)
    last_why = ""
    while True:
        try:
            async with asyncio.timeout(READ_WITHIN_S):
                return await _read_once(registry)
        except _FAULTS as error:
            why = str(error) or f"no answer within {READ_WITHIN_S:g} s"
            if isinstance(error, grpc.aio.AioRpcError | LinkError):
                why = error.details() or error.code().name
            if why != last_why:
                last_why = why
                log.warning("no tokenizer yet from a worker of %s: %s", registry.address, why)
        await asyncio.sleep(backoff.next_s())


async def _read_once(registry: RegistryAccess) -> tuple[TextModel, bytes]:
    """Read it from one worker. Raises one of `_FAULTS`."""
    info, answers = await _live_worker(registry), registry.config.answers
    with tempfile.TemporaryDirectory(prefix="baton-tokenizer-") as folder:
        files = await _fetched(info, registry, Path(folder))
        text = await asyncio.to_thread(TextModel, files, answers.tool_calls, answers.reasoning)
    log.info("tokenizer read from %s at %s", info.ref.worker_id, info.address)
    return text, info.model_fingerprint


async def _live_worker(registry: RegistryAccess) -> control_pb2.WorkerInfo:
    """Return any live worker. Raises AioRpcError, UnavailableError."""
    async with registry.stub() as stub:
        fleet = stub.WatchFleet(control_pb2.WatchFleetRequest(), timeout=_FLEET_WITHIN_S)
        message = await anext(aiter(fleet), None)
        fleet.cancel()
    workers = [] if message is None else message.workers
    live = [each.info for each in workers if each.state == control_pb2.WORKER_STATE_LIVE]
    if not live:
        raise UnavailableError("no worker is live")
    return random.choice(live)


async def _fetched(
    info: control_pb2.WorkerInfo, registry: RegistryAccess, folder: Path
) -> list[Path]:
    """Fetch a worker's files into a folder. Raises LinkError, OSError, TimeoutError."""
    link = await Link.connect(
        info.address,
        registry.own,
        keepalive_s=registry.config.links.keepalive_s,
        timeout_s=registry.config.links.connect_timeout_s,
        worker=link_name(info.ref),
    )
    pieces = _Pieces(folder)
    try:
        link.call(Method.READ_TOKENIZER, worker_pb2.ReadTokenizerRequest(), pieces)
        await pieces.ended
    finally:
        link.close("it was read")
    return list(pieces.files.values())


class _Pieces:
    """Write the files that a worker sends. A link's `Caller`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files: dict[str, Path] = {}
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_message(self, piece: worker_pb2.ReadTokenizerResponse) -> None:
        if piece.name in TEXT_FILES:
            path = self.files.setdefault(piece.name, self._folder / piece.name)
            with path.open("ab") as file:
                file.write(piece.data)

    def on_end(self, error: LinkError | None) -> None:
        if error is not None and not self.ended.done():
            self.ended.set_exception(error)
        elif not self.ended.done():
            self.ended.set_result(None)


_POINTS = 2**53  # as many as floats between 0 and 1 can distinguish


@dataclass(frozen=True)
class UnitKey:
    """A unit, named by its code and its control service."""

    code: str
    control_address: str


class UnitRouter:
    """Own a unit's router. `make` makes one that was not started, however long that takes;
    `on_change` is called when `router` is another."""

    def __init__(
        self,
        key: UnitKey,
        make: Callable[[UnitKey], Awaitable[Router]],
        on_change: Callable[[], None],
    ) -> None:
        self.key = key
        self.share = 0.0
        self.router: Router | None = None
        """None: it has yet to be made."""
        self._make, self._on_change = make, on_change
        self._owned: Router | None = None  # until it is closed
        self._is_reading = False
        self._leaves = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, on_end: Callable[[asyncio.Task[None]], None]) -> None:
        self._task = asyncio.create_task(self._run(), name=f"unit {self.key.code}")
        self._task.add_done_callback(on_end)

    @property
    def has_left(self) -> bool:
        """It is no longer in the list."""
        return self._leaves.is_set()

    def leave(self) -> None:
        """Let what runs continue to its end; nothing new comes."""
        self._leaves.set()
        if self._is_reading and self._task is not None:
            self._task.cancel()

    async def close(self, drain_s: float) -> None:
        """Close at once; what runs has `drain_s` to end."""
        self._leaves.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._owned is not None:
            await self._owned.close(drain_s)

    async def _run(self) -> None:
        while not self._leaves.is_set():
            self._is_reading = True
            router = self._owned = await self._make(self.key)
            self._is_reading = False
            await router.start()
            self._set(router)
            await _first(router.replaced, self._leaves)
            if not router.replaced.is_set():
                await router.run_out()
            self._set(None)
            await router.close()
            self._owned = None

    def _set(self, router: Router | None) -> None:
        self.router = router
        self._on_change()


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def point_of(request_id: str) -> float:
    """Return where a request lies between 0 and 1; the same at every router."""
    digest = blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _POINTS / _POINTS


def drawn(request_id: str, shares: Sequence[float]) -> int:
    """Return the index of the unit that a request goes to. `shares`: of units, the oldest first.

    The youngest has the points from 0 on: while its share grows, requests move to it, and none
    moves back.
    """
    point, last = point_of(request_id), 0
    for index in reversed(range(len(shares))):
        if shares[index] > 0:
            last = index
            if point < shares[index]:
                break
            point -= shares[index]
    return last
