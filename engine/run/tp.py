"""Tensor-parallel ranks: one process each. Rank 0 plans and sends the plan to the others.

Life of a group:

1. Every rank joins with `TpGroup.join`. Rank 0 listens before the others learn its port: a port
   that nobody holds could go to another replica.
2. Each step rank 0 sends the plan's difference from the last one (`plan_deltas`). Ranks > 0 wait
   for it in `TorchRunner.follow`, without a limit.
3. Inside a step every collective is bounded by `_STEP_TIMEOUT`. A rank that died or hangs makes it
   raise TpPeerError on the others, and the whole replica is torn down.
4. Rank 0 sends the stop message with `close`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from engine.engines import RankPosition
from engine.request import StepPlan
from engine.run.plan_deltas import PlanDecoder, PlanDelta, PlanEncoder

T = TypeVar("T")

# One broadcast carries a plan of running sequences; new long ones need a second.
_INLINE_BYTES = 16 << 10
_LENGTH_BYTES = 8
# An idle replica sends no plans; a dead peer still ends the wait because its connection closes.
_IDLE_TIMEOUT = timedelta(days=365)
_STEP_TIMEOUT = timedelta(seconds=30)


class TpPeerError(RuntimeError):
    """A rank of this replica is dead or hangs: the replica cannot go on."""


class TpGroup:
    """This process's membership in a replica's group of ranks."""

    def __init__(self, rank: int, size: int, device: torch.device, store: Store) -> None:
        self.rank = rank
        self.size = size
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=_STEP_TIMEOUT
        )
        self._compute = dist.group.WORLD
        self._plans = dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
        self._inbox = torch.zeros(_INLINE_BYTES, dtype=torch.uint8)
        self._encoder = PlanEncoder()
        self._decoder = PlanDecoder()

    @classmethod
    def join(cls, position: RankPosition, device: str = "cpu", timeout_s: float = 120.0) -> TpGroup:
        """Meet the other ranks. The group owns the position's socket from now on.

        Raises TpPeerError when not all come within `timeout_s`.
        """
        rank, size, listen_fd = position.rank, position.size, position.listen_fd
        host, _, port = position.meeting.rpartition(":")

        def meet() -> TpGroup:
            limit = timedelta(seconds=timeout_s)
            store = TCPStore(host, int(port), size, rank == 0, limit, master_listen_fd=listen_fd)
            return cls(rank, size, torch.device(device), store)

        return _with_peers(meet, f"joining {position.meeting} as rank {rank} of {size}")

    def send_plan(self, plan: StepPlan | None) -> None:
        """Rank 0: send what all ranks run next; None stops them."""
        delta = None if plan is None else self._encoder.encode(plan)
        payload = pickle.dumps(delta, protocol=pickle.HIGHEST_PROTOCOL)
        length = len(payload).to_bytes(_LENGTH_BYTES, "little")
        inline = _INLINE_BYTES - _LENGTH_BYTES
        head = length + payload[:inline].ljust(inline, b"\0")
        self._broadcast(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        if len(payload) > inline:
            self._broadcast(torch.frombuffer(bytearray(payload[inline:]), dtype=torch.uint8))

    def receive_plan(self) -> StepPlan | None:
        """Ranks > 0: wait for the next plan; None is the stop message. Its block tables are valid
        until the next call. Raises TpPeerError, LostPlanError."""
        self._broadcast(self._inbox)
        head = self._inbox.numpy().tobytes()
        length = int.from_bytes(head[:_LENGTH_BYTES], "little")
        payload = head[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if len(payload) < length:
            rest = torch.empty(length - len(payload), dtype=torch.uint8)
            self._broadcast(rest)
            payload += rest.numpy().tobytes()
        delta = pickle.loads(payload)  # from our own rank 0
        assert delta is None or isinstance(delta, PlanDelta), type(delta)
        return None if delta is None else self._decoder.plan(delta)

    def wait_all(self) -> None:
        """Return when every rank is here, however long their loading takes."""
        _with_peers(lambda: dist.barrier(group=self._plans), "waiting for the other ranks")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place. Raises TpPeerError."""
        _with_peers(lambda: dist.all_reduce(x, group=self._compute), "all-reduce")
        return x

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, however long their loading takes. Raises
        TpPeerError."""
        found: list[T | None] = [None] * self.size
        gathered = lambda: dist.all_gather_object(found, value, group=self._plans)  # noqa: E731
        _with_peers(gathered, "gathering the ranks' values")
        return cast("list[T]", found)

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor | None:
        """On rank 0, put the ranks' columns side by side, equally many of each; None on the
        others."""
        logits = logits.contiguous()
        parts = [torch.empty_like(logits) for _ in range(self.size)] if self.rank == 0 else None
        _with_peers(lambda: dist.gather(logits, parts, dst=0, group=self._compute), "gather")
        return None if parts is None else torch.cat(parts, dim=1)

    def close(self) -> None:
        """Leave the group. Rank 0 first sends the stop message to ranks that are still there."""
        try:
            if self.rank == 0:
                self.send_plan(None)
        finally:
            dist.destroy_process_group()

    def _broadcast(self, buffer: torch.Tensor) -> None:
        _with_peers(lambda: dist.broadcast(buffer, src=0, group=self._plans), "plan broadcast")


def _with_peers(collective: Callable[[], T], what: str) -> T:
    try:
        return collective()
    except RuntimeError as error:  # torch.distributed's errors derive from it
        raise TpPeerError(f"{what} failed: {error}") from error
