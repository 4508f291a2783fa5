"""A worker's standing in the registry: it registers, sends heartbeats, and comes back for ever.

The registry is rebuilt from workers that register again, so losing it must never disturb a worker.
Only a worker of another model than the registry's ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from baton import status
from baton.errors import OtherModelError
from baton.grpc_options import DIRECT, sends_pings
from baton.v1 import control_pb2, control_pb2_grpc, worker_pb2
from cluster.registry.fleet_wire import ROLES
from cluster.worker.config import WorkerConfig
from cluster.worker.rank import Rank
from engine.api import EngineCapacity, EngineLoad

log = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0
# A pool shared by the process would also share its back-off, which grows to minutes.
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    *sends_pings(5.0),
    *DIRECT,
)


@dataclass(frozen=True)
class Beat:
    """One heartbeat's content."""

    progress: control_pb2.StepProgress
    load: worker_pb2.WorkerLoad
    draining: bool


def worker_info(
    config: WorkerConfig, rank: Rank, capacity: EngineCapacity, address: str
) -> control_pb2.WorkerInfo:
    """What a worker that serves at `address` tells of itself; `rank`: its rank 0."""
    model, pod = rank.model, config.pod
    computes = config.engine.backend == "torch"
    return control_pb2.WorkerInfo(
        ref=rank.identity.to_proto(),
        pool=config.pool,
        role=ROLES[config.role],
        address=address,
        model=config.model_name,
        kv_fingerprint=model.kv_fingerprint,
        model_fingerprint=model.model_fingerprint,
        dtype=model.layout.groups[0].tensors[0].dtype if computes else "",
        tp_size=rank.identity.tp_size,
        block_size=model.layout.block_size,
        num_blocks=capacity.num_blocks,
        max_model_len=capacity.max_model_len,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        vocab_size=model.vocab_size,
        kv_bytes_per_token=model.layout.token_bytes(),
        max_request_tokens=capacity.max_request_tokens or 0,
        max_held_tokens_per_request=capacity.max_held_tokens or 0,
        pod_name="" if pod is None else pod.name,
        node_name="" if pod is None else pod.node_name,
    )


def worker_load(load: EngineLoad, handoff_bytes_per_s: float) -> worker_pb2.WorkerLoad:
    """What a worker tells of its engine's load."""
    return worker_pb2.WorkerLoad(
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        num_reserved=load.num_reserved,
        num_queued_tokens=load.num_queued_tokens,
        num_free_blocks=load.num_free_blocks,
        num_blocks=load.num_blocks,
        num_quarantined_blocks=load.num_quarantined_blocks,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        decode_step_s=load.decode_step_s,
        handoff_bytes_per_s=handoff_bytes_per_s,
    )


class Registrar:
    """Keeps one worker registered at one control service.

    `beat` is asked for the content of each heartbeat; `on_drain` is called when the registry asks
    the worker to drain, possibly more than once.
    """

    def __init__(
        self,
        control_address: str,
        info: control_pb2.WorkerInfo,
        beat: Callable[[], Beat],
        on_drain: Callable[[], None],
        interval_s: float = 0.3,
    ) -> None:
        self._address = control_address
        self._info = info
        self._beat = beat
        self._on_drain = on_drain
        self._interval_s = interval_s

    async def run(self) -> None:
        """Stay registered until cancelled. Raises OtherModelError when the registry serves another
        model."""
        wait_s = _FIRST_WAIT_S
        this = asyncio.current_task()
        while True:
            try:
                heard = await self._stay_registered()
            except grpc.aio.AioRpcError as error:
                told = status.from_rpc_error(error, self._address)
                if isinstance(told, OtherModelError):
                    raise told from error
                log.warning(
                    "registry at %s: %s %s", self._address, error.code().name, error.details()
                )
                heard = False
            if this is not None and this.cancelling():
                # It came while the call was failing, and the call's own error took its place.
                raise asyncio.CancelledError
            wait_s = _FIRST_WAIT_S if heard else min(2 * wait_s, _LONGEST_WAIT_S)
            await asyncio.sleep(wait_s)

    async def _stay_registered(self) -> bool:
        """One stream's life. True when the registry ended it in good order."""
        async with grpc.aio.insecure_channel(self._address, options=_CHANNEL_OPTIONS) as channel:
            # A channel that is not there yet fails at once; the caller's back-off is the wait.
            stub = control_pb2_grpc.ControlServiceStub(channel)
            call = stub.Register(self._messages())
            async for response in call:
                if response.drain:
                    self._on_drain()
        return True

    async def _messages(self) -> AsyncIterator[control_pb2.RegisterRequest]:
        worker: control_pb2.WorkerInfo | None = self._info
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                beat = self._beat()
                yield control_pb2.RegisterRequest(
                    worker=worker,
                    progress=beat.progress,
                    load=beat.load,
                    draining=beat.draining,
                )
                worker = None
                await asyncio.sleep(self._interval_s)
