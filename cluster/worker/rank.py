"""One rank of a replica put together: model, memory, transfer, runner. Blocks; no event loop."""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.config.engine import EngineConfig
from cluster.worker.agreed_dtype import with_agreed_dtype
from cluster.worker.config import RankPlace, WorkerConfig
from engine.api import ModelSpec, Runner
from engine.build import (
    build_runner,
    find_model,
    load_decoder,
    load_model_spec,
    region_layout,
    with_kv_memory,
)
from kv_transfer.layout import RegionLayout
from kv_transfer.lease import RankAddress, WorkerIdentity
from kv_transfer.rank import TransferRank
from kv_transfer.transport import TransferMemory, Transport
from kv_transfer.transports import make_transport

if TYPE_CHECKING:
    from engine.tp import TpGroup

log = logging.getLogger(__name__)

OnFatal = Callable[[BaseException], None]

_MEETING_TIMEOUT_S = 120.0
_INCARNATION_RANDOM_BITS = 20


@dataclass(frozen=True)
class Rank:
    """What every rank has; rank 0 puts an engine and services on top, the others follow."""

    model_folder: str
    model: ModelSpec
    identity: WorkerIdentity
    transport: Transport
    transfer: TransferRank
    runner: Runner

    def close(self) -> None:
        """After the engine's thread has ended."""
        self.runner.close()
        self.transport.close()


def new_incarnation() -> int:
    """Milliseconds since 1970 and random bits: no two are equal, and later starts are larger
    unless the clock was set back in between."""
    milliseconds = time.time_ns() // 1_000_000
    return milliseconds << _INCARNATION_RANDOM_BITS | secrets.randbits(_INCARNATION_RANDOM_BITS)


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def listen(host: str) -> socket.socket:
    """Any free port of this host, held: the ranks of a replica meet there."""
    return socket.create_server((host, 0))


def build_rank(config: WorkerConfig, place: RankPlace, on_fatal: OnFatal | None = None) -> Rank:
    """Load this rank's part of the model and join the other ranks.

    `on_fatal` is told, on a thread of the transport's, when the rank can transfer no more. Raises
    ModelError, TransportError, TpPeerError, ValueError, and UnavailableError where the registry
    says nothing of a dtype that is left open.
    """
    started_at = time.monotonic()
    group = _join_group(config, place)
    model = find_model(config.model_path, config.model_revision, config.engine)
    config = with_agreed_dtype(config, model)
    spec = load_model_spec(model, config.engine, group)
    decoder = load_decoder(model, config.engine, spec, group)  # first: the rest is for KV
    engine = with_kv_memory(config.engine, spec, decoder, group)
    layout = region_layout(spec, engine, place.rank, place.size)
    transport = make_transport(config.transfer)
    if on_fatal is not None:
        transport.on_fatal = on_fatal
    memory = _pool(engine, transport, layout)
    if group is not None:
        group.wait_all()  # a rank's pool may take it longer than a collective may
    identity = _meet(config.worker_id, place, TransferRank.address_of(transport, place.rank))
    transfer = TransferRank(
        transport,
        memory,
        layout,
        identity,
        place.rank,
        None if place.rank == 0 else identity.rank0_address,
        config.transfer,
    )
    runner = build_runner(decoder, engine, spec, memory, transfer, group)
    if place.rank == 0 and not transfer.wait_ready(_MEETING_TIMEOUT_S):
        raise TimeoutError("not every rank has told which memory it offers")
    log.info(
        "%s rank %d of %d ready after %.1f s: %s, %d blocks of %d tokens",
        config.worker_id,
        place.rank,
        place.size,
        time.monotonic() - started_at,
        config.model_name,
        runner.num_blocks,
        spec.layout.block_size,
    )
    return Rank(model, spec, identity, transport, transfer, runner)


def _join_group(config: WorkerConfig, place: RankPlace) -> TpGroup | None:
    """None: this rank is the whole replica."""
    if place.size == 1:
        return None
    if config.engine.backend == "fake":
        raise ValueError("the fake engine has one rank: set tensor_parallel to 1")
    from engine.device import device_of  # torch, which a fake worker does without
    from engine.tp import TpGroup

    return TpGroup.join(
        place.rank,
        place.size,
        place.meeting,
        place.listen_fd,
        device_of(config.engine).type,
        _MEETING_TIMEOUT_S,
    )


def _pool(engine: EngineConfig, transport: Transport, layout: RegionLayout) -> TransferMemory:
    """On a GPU torch allocates it and the transport registers it; else the transport allocates."""
    if engine.backend != "fake":
        from engine.device import device_of
        from engine.local_memory import LocalDeviceMemory

        if (device := device_of(engine)).type != "cpu":
            pool = LocalDeviceMemory(layout, engine.num_regions, str(device))
            return transport.register(pool.buffer, engine.num_regions, layout.num_blocks)
    return transport.allocate(engine.num_regions, layout.num_bytes(), layout.num_blocks)


def follow_rank0(config: WorkerConfig, place: RankPlace, on_fatal: OnFatal) -> None:
    """The life of a rank > 0: run rank 0's plans until it stops. Raises TpPeerError."""
    from engine.tp import follow

    rank = build_rank(config, place, on_fatal)
    try:
        follow(rank.runner)  # type: ignore[arg-type]  # runners of a group are followers
    finally:
        rank.transport.close()


def _meet(worker_id: str, place: RankPlace, mine: RankAddress) -> WorkerIdentity:
    """Exchange addresses; rank 0's incarnation is the replica's."""
    incarnation = new_incarnation()
    if place.size == 1:
        return WorkerIdentity(worker_id, incarnation, (mine,))
    import torch.distributed as dist

    told: list[tuple[int, RankAddress] | None] = [None] * place.size
    dist.all_gather_object(told, (incarnation, mine))
    everyone = [entry for entry in told if entry is not None]
    assert len(everyone) == place.size, told
    return WorkerIdentity(worker_id, everyone[0][0], tuple(address for _, address in everyone))
