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
from typing import TYPE_CHECKING, cast

from baton.config.engine import AUTO, Dtype, EngineConfig
from baton.control.client import ControlClient
from baton.errors import NotFoundError, UnavailableError
from baton.identity.identity import open_identity
from baton.process.interpreter import freeze_heap
from cluster.worker.config import RankPosition, WorkerConfig
from engine.api import ModelSpec, Runner
from engine.run.build import build_runner, find_model, load_decoder, load_model_spec, with_kv_memory
from kv_transfer.layout import RegionLayout
from kv_transfer.lease import RankAddress, WorkerIdentity
from kv_transfer.rank import TransferRank
from kv_transfer.transport import TransferMemory, Transport
from kv_transfer.transports.by_name import make_transport

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from engine.run.tp import TpGroup

OnFatal = Callable[[BaseException], None]

_MEETING_TIMEOUT_S = 120.0
_INCARNATION_RANDOM_BITS = 20


@dataclass(frozen=True)
class Rank:
    """What every rank has. Rank 0 adds an engine and services; the other ranks follow it."""

    model_folder: str
    model: ModelSpec
    identity: WorkerIdentity
    transport: Transport
    transfer: TransferRank
    runner: Runner

    def close(self) -> None:
        """Free everything, after the engine's thread has ended."""
        self.runner.close()
        self.transport.close()


def new_incarnation() -> int:
    """Milliseconds since 1970 plus random bits: unique, and larger for later starts unless the
    clock was set back."""
    milliseconds = time.time_ns() // 1_000_000
    return milliseconds << _INCARNATION_RANDOM_BITS | secrets.randbits(_INCARNATION_RANDOM_BITS)


def free_port(host: str) -> int:
    """A port that is free now, and that no connection is given until it is used: one below those
    that Linux draws from. Raises OSError."""
    for _ in range(100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((host, port := 20_000 + secrets.randbelow(12_000)))
            return port
    raise OSError(f"no port is free at {host}")


def listen(host: str) -> socket.socket:
    """Listen on any free port of this host, where the ranks of a replica meet."""
    return socket.create_server((host, 0))


def build_rank(
    config: WorkerConfig, position: RankPosition, on_fatal: OnFatal | None = None
) -> Rank:
    """Load this rank's part of the model and join the other ranks.

    `on_fatal` is called on the transport's thread when it fails. Raises ModelError, TransportError,
    TpPeerError, ValueError, and UnavailableError if no dtype was agreed on.
    """
    started_at = time.monotonic()
    group = _join_group(config, position)
    model = find_model(config.model_path, config.model_revision, config.engine)
    config = with_agreed_dtype(config, model)
    spec = load_model_spec(model, config.engine, group)
    decoder = load_decoder(model, config.engine, spec, group)  # first: KV gets the memory left
    engine = with_kv_memory(config.engine, spec, decoder, group)
    layout = spec.region_layout(engine, position.rank, position.size)
    transport = make_transport(config.transfer)
    if on_fatal is not None:
        transport.on_fatal = on_fatal
    memory = _pool(engine, transport, layout)
    if group is not None:
        group.wait_all()  # allocating a pool may take longer than a collective's timeout
    identity = _meet(config.worker_id, position, TransferRank.address_of(transport, position.rank))
    transfer = TransferRank(transport, memory, layout, identity, config.transfer)
    runner = build_runner(decoder, engine, spec, memory, transfer, group)
    if position.rank == 0 and not transfer.wait_ready(_MEETING_TIMEOUT_S):
        raise TimeoutError("not every rank has reported its memory")
    log.info(
        "%s rank %d of %d ready after %.1f s: %s, %d blocks of %d tokens",
        config.worker_id,
        position.rank,
        position.size,
        time.monotonic() - started_at,
        config.model_name,
        runner.num_blocks,
        spec.layout.block_size,
    )
    return Rank(model, spec, identity, transport, transfer, runner)


def _join_group(config: WorkerConfig, position: RankPosition) -> TpGroup | None:
    """Join the replica's tensor-parallel group; None: it has one rank."""
    if position.size == 1:
        return None
    if config.engine.backend == "fake":
        raise ValueError("the fake engine has one rank: set tensor_parallel to 1")
    from engine.run.auto_choice import device_of  # torch, which a fake worker does without
    from engine.run.tp import TpGroup

    return TpGroup.join(
        position.rank,
        position.size,
        position.meeting,
        position.listen_fd,
        device_of(config.engine).type,
        _MEETING_TIMEOUT_S,
    )


def _pool(engine: EngineConfig, transport: Transport, layout: RegionLayout) -> TransferMemory:
    """The KV pool. On a GPU torch allocates and the transport registers it; else the transport
    allocates it."""
    if engine.backend != "fake":
        from engine.api import LocalDeviceMemory
        from engine.run.auto_choice import device_of

        if (device := device_of(engine)).type != "cpu":
            pool = LocalDeviceMemory(layout, engine.num_regions, str(device))
            return transport.register(pool.buffer, engine.num_regions, layout.num_blocks)
    return transport.allocate(engine.num_regions, layout.num_bytes(), layout.num_blocks)


def follow_rank0(config: WorkerConfig, position: RankPosition, on_fatal: OnFatal) -> None:
    """Run a rank > 0: execute rank 0's plans until it stops. Raises TpPeerError."""
    from engine.run.tp import follow

    rank = build_rank(config, position, on_fatal)
    freeze_heap()
    try:
        follow(rank.runner)  # type: ignore[arg-type]  # runners of a group are followers
    finally:
        rank.transport.close()


def _meet(worker_id: str, position: RankPosition, mine: RankAddress) -> WorkerIdentity:
    """Exchange addresses with the other ranks. Rank 0's incarnation is the replica's."""
    incarnation = new_incarnation()
    if position.size == 1:
        return WorkerIdentity(worker_id, incarnation, (mine,))
    import torch.distributed as dist

    gathered: list[tuple[int, RankAddress] | None] = [None] * position.size
    dist.all_gather_object(gathered, (incarnation, mine))
    everyone = [entry for entry in gathered if entry is not None]
    assert len(everyone) == position.size, gathered
    return WorkerIdentity(worker_id, everyone[0][0], tuple(address for _, address in everyone))


_AGREE_WITHIN_S = 60.0  # a supervisor that has just been started again is there long before
_ASK_AGAIN_S = 0.5


def with_agreed_dtype(config: WorkerConfig, model: str) -> WorkerConfig:
    """The configuration with the agreed dtype, if it was `auto`. `model`: its folder. Blocks.

    Raises ModelError, and UnavailableError if the registry does not answer.
    """
    engine = config.engine
    if not config.in_pod or engine.backend != "torch" or engine.dtype != AUTO:
        return config
    from engine.run.auto_choice import (
        choose_dtype,
        device_of,  # torch, which a fake worker does without
    )

    own = choose_dtype(model, [device_of(engine).type])
    dtype, reason = _agreed(config, own.dtype), own.reason
    if dtype != own.dtype:
        reason = f"agreed with the other workers; {own.dtype} by itself"
    log.info("%s computes in %s: %s", config.pool, dtype, reason)
    return dataclasses.replace(config, engine=dataclasses.replace(engine, dtype=cast(Dtype, dtype)))


def _agreed(config: WorkerConfig, own: str) -> str:
    give_up_at = time.monotonic() + _AGREE_WITHIN_S
    identity = open_identity(config.internal, "worker")
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
