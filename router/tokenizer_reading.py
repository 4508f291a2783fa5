"""The tokenizer of a unit, read from one of its workers."""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from baton.config.router import RouterConfig
from baton.errors import ConfigError, UnavailableError
from baton.model_folder import TEXT_FILES
from baton.v1 import control_pb2, control_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.backoff import Backoff
from router.text import TextModel
from router.worker_link import channel_options

log = logging.getLogger(__name__)

READ_WITHIN_S = 60.0
_FLEET_WITHIN_S = 5.0


@dataclass(frozen=True)
class ReadTokenizer:
    text: TextModel
    model_fingerprint: bytes
    """Of the worker that it was read from."""


async def read_tokenizer(control_address: str, config: RouterConfig) -> ReadTokenizer:
    """Read it from any live worker. Tries again until one has it."""
    backoff = Backoff(config.reconnect_min_s, config.reconnect_max_s, random.Random())
    last_why = ""
    while True:
        try:
            async with asyncio.timeout(READ_WITHIN_S):
                return await _read_once(control_address, config)
        except (grpc.aio.AioRpcError, UnavailableError, ConfigError, TimeoutError) as error:
            why = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            why = why or f"no answer within {READ_WITHIN_S:g} s"
            if why != last_why:
                last_why = why
                log.warning("no tokenizer yet from a worker of %s: %s", control_address, why)
        await asyncio.sleep(backoff.next_s())


async def _read_once(control_address: str, config: RouterConfig) -> ReadTokenizer:
    """Raises AioRpcError, UnavailableError, ConfigError."""
    info = await _live_worker(control_address, config)
    with tempfile.TemporaryDirectory(prefix="baton-tokenizer-") as folder:
        files = await _fetched(info.address, config, Path(folder))
        text = await asyncio.to_thread(TextModel.load, files)
    log.info("tokenizer read from %s at %s", info.ref.worker_id, info.address)
    return ReadTokenizer(text, info.model_fingerprint)


async def _live_worker(control_address: str, config: RouterConfig) -> control_pb2.WorkerInfo:
    """Raises AioRpcError, UnavailableError."""
    options = channel_options(config)
    async with grpc.aio.insecure_channel(control_address, options=options) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        fleet = stub.WatchFleet(control_pb2.WatchFleetRequest(), timeout=_FLEET_WITHIN_S)
        message = await anext(aiter(fleet), None)
        fleet.cancel()
    workers = [] if message is None else message.workers
    live = [each.info for each in workers if each.state == control_pb2.WORKER_STATE_LIVE]
    if not live:
        raise UnavailableError("no worker is live")
    return random.choice(live)


async def _fetched(address: str, config: RouterConfig, folder: Path) -> list[Path]:
    """Raises AioRpcError."""
    async with grpc.aio.insecure_channel(address, options=channel_options(config)) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        files: dict[str, Path] = {}
        async for piece in stub.ReadTokenizer(worker_pb2.ReadTokenizerRequest()):
            if piece.name in TEXT_FILES:
                path = files.setdefault(piece.name, folder / piece.name)
                with path.open("ab") as file:
                    file.write(piece.data)
    return list(files.values())
