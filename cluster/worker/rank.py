"""Builds one rank of a replica: model, memory, transfer, runner. Blocks; uses no event loop.

With `engine.dtype: auto` on pods only the workers' own pods have the model's folder, so nobody can
choose a dtype before they start. Each worker asks the registry before it loads the model, and
proposes the dtype that it would choose. The first proposal decides for all pools with `dtype:
auto`: workers on different devices could choose different dtypes and would never pair.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from baton.config.engine import AUTO, Dtype
from baton.control.client import ControlClient
from baton.errors import NotFoundError, UnavailableError
from baton.identity.identity import open_identity
from baton.model_folder import find_text_files
from baton.process.interpreter import freeze_heap
from cluster.worker.config import RankPosition, WorkerConfig
from engine.api import Engine, LocalDeviceMemory, ModelSpec
from engine.engines import EngineBuilder, LoadedModel, engine_builder
from kv_transfer.layout import RegionLayout
from kv_transfer.lease import RankAddress, WorkerIdentity
from kv_transfer.rank import TransferRank
from kv_transfer.transport import TransferMemory, Transport
from kv_transfer.transports.by_name import make_transport

log = logging.getLogger(__name__)

OnFatal = Callable[[BaseException], None]

_MEETING_TIMEOUT_S = 120.0
_INCARNATION_RANDOM_BITS = 20


@dataclass(frozen=True)
class Rank:
    """One rank. Rank 0 has the engine, to which `Worker` adds services; the others follow it."""

    model_folder: str
    model: ModelSpec
    identity: WorkerIdentity
    transport: Transport
    transfer: TransferRank
    engine: Engine | None
    """Rank 0's engine; None on the others."""
    follow: Callable[[], None]
    """Computes what rank 0 does, on another rank, until rank 0 closes. Raises TpPeerError."""

    def close(self) -> None:
        """Free everything, after the engine's thread has ended."""
        if self.engine is not None:
            self.engine.close()
        self.transport.close()


def new_incarnation() -> int:
    """Milliseconds since 1970 plus random bits: unique, and larger for later starts unless the
    clock was set back."""
    milliseconds = time.time_ns() // 1_000_000
    return milliseconds << _INCARNATION_RANDOM_BITS | secrets.randbits(_INCARNATION_RANDOM_BITS)


def free_port(host: str) -> int:
    """Return a port that is free now. It stays free of connections, since it is below those that
    Linux draws from. Raises OSError."""
    for _ in range(100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((host, port := 20_000 + secrets.randbelow(12_000)))
            return port
    raise OSError(f"no port is free at {host}")


def build_rank(
    config: WorkerConfig, position: RankPosition, on_fatal: OnFatal | None = None
) -> Rank:
    """Load this rank's part of the model and join the other ranks.

    `on_fatal` is called on the transport's thread when it fails. Raises ModelError, TransportError,
    TpPeerError, ValueError, and UnavailableError if no dtype was agreed on.
    """
    started_at = time.monotonic()
    builder, cluster = engine_builder(config.engine), config.cluster
    builder.join(config.engine, position, _MEETING_TIMEOUT_S)
    folder = builder.find_model(cluster.model, cluster.model_revision)
    config = with_agreed_dtype(config, folder, builder)
    spec = builder.describe(folder, config.engine)
    loaded = builder.load(folder, config.engine, spec)  # first: KV gets the memory left
    layout = spec.region_layout(loaded.config, position.rank, position.size)
    transport = make_transport(config.transfer)
    if on_fatal is not None:
        transport.on_fatal = on_fatal
    memory = _pool(loaded, transport, layout)
    identity = _meet(config.worker_id, builder, TransferRank.address_of(transport, position.rank))
    transfer = TransferRank(transport, memory, layout, identity, config.transfer)
    if position.rank == 0 and not transfer.wait_ready(_MEETING_TIMEOUT_S):
        raise TimeoutError("not every rank has reported its memory")
    log.info(
        "%s rank %d of %d ready after %.1f s: %s, %d blocks of %d tokens",
        config.worker_id,
        position.rank,
        position.size,
        time.monotonic() - started_at,
        cluster.model_name,
        memory.num_regions * memory.blocks_per_region,
        spec.layout.block_size,
    )
    find_tokenizer = partial(_find_tokenizer, folder, cluster.tokenizer)
    engine = None if position.rank else loaded.make_engine(memory, transfer, find_tokenizer)
    follow = partial(loaded.follow, memory, transfer)
    return Rank(folder, spec, identity, transport, transfer, engine, follow)


def _find_tokenizer(folder: str, tokenizer: str | None) -> Path:
    """Find the model's tokenizer.json. Raises ConfigError."""
    paths = find_text_files(folder, tokenizer=tokenizer)
    return next(path for path in paths if path.name == "tokenizer.json")


def _pool(loaded: LoadedModel, transport: Transport, layout: RegionLayout) -> TransferMemory:
    """Make the KV pool. On a GPU torch allocates and the transport registers it; else the transport
    allocates it."""
    num_regions, device = loaded.config.num_regions, loaded.kv_device
    if device in (None, "cpu"):
        return transport.allocate(num_regions, layout.num_bytes(), layout.num_blocks)
    pool = LocalDeviceMemory(layout, num_regions, device)
    return transport.register(pool.buffer, num_regions, layout.num_blocks)


def follow_rank0(config: WorkerConfig, position: RankPosition, on_fatal: OnFatal) -> None:
    """Run a rank > 0: execute rank 0's plans until it stops. Raises TpPeerError."""
    rank = build_rank(config, position, on_fatal)
    freeze_heap()
    try:
        rank.follow()
    finally:
        rank.transport.close()


def _meet(worker_id: str, builder: EngineBuilder, mine: RankAddress) -> WorkerIdentity:
    """Exchange addresses with the other ranks. Rank 0's incarnation is the replica's. Allocating a
    pool may take longer than a collective's timeout, so all ranks come here first."""
    everyone: list[tuple[int, RankAddress]] = builder.gather((new_incarnation(), mine))
    return WorkerIdentity(worker_id, everyone[0][0], tuple(address for _, address in everyone))


_AGREE_WITHIN_S = 60.0  # a supervisor that has just been started again is there long before
_ASK_AGAIN_S = 0.5


def with_agreed_dtype(config: WorkerConfig, folder: str, builder: EngineBuilder) -> WorkerConfig:
    """Return the configuration with the agreed dtype, if it was `auto`. `folder`: the model's.

    Raises ModelError, and UnavailableError if the registry does not answer.
    """
    engine = config.engine
    if not config.in_pod or engine.dtype != AUTO:
        return config
    own = builder.choose_dtype(folder, engine)
    if own is None:
        return config
    dtype, reason = _agreed(config, own.dtype), own.reason
    if dtype != own.dtype:
        reason = f"agreed with the other workers; {own.dtype} by itself"
    log.info("%s computes in %s: %s", config.pool, dtype, reason)
    return dataclasses.replace(config, engine=dataclasses.replace(engine, dtype=cast(Dtype, dtype)))


def _agreed(config: WorkerConfig, own: str) -> str:
    give_up_at = time.monotonic() + _AGREE_WITHIN_S
    identity = open_identity(config.cluster.internal, "worker")
    with ControlClient(config.control_address, identity=identity) as control:
        while True:
            try:
                return control.agree_dtype(config.pool, own)
            except (
                NotFoundError,
                UnavailableError,
            ) as error:  # the registry, or its pools, are not restored yet
                if time.monotonic() >= give_up_at:
                    raise UnavailableError(f"no dtype was agreed on: {error.message}") from error
                time.sleep(_ASK_AGAIN_S)
