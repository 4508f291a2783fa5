"""The engine's seams: what a worker drives (`Engine`), what runs a step (`Runner`), where finished
KV goes (`KvSink`).

An engine is synchronous and belongs to one thread; `engine.loop.EngineThread` gives it one and
carries commands in and events out. Every engine, torch or fake, is the same scheduler and block
pool over a different `Runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from engine.request import (
    BlockPush,
    EngineEvent,
    HandoffId,
    NoCapacityEvent,
    RequestId,
    RequestSpec,
    ReservedEvent,
    SampledToken,
    StepPlan,
)
from kv_transfer.block_hash import BlockHash
from kv_transfer.layout import KvLayout, RegionLayout


@dataclass(frozen=True)
class ModelSpec:
    """What the outside must know of a loaded model."""

    name: str
    layout: KvLayout
    kv_fingerprint: bytes
    model_fingerprint: bytes
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]

    def block_bytes(self, tp_size: int) -> int:
        """One KV block of every layer group, at the TP rank that has most."""
        groups = range(len(self.layout.groups))
        return max(
            sum(self.layout.rank_block_bytes(group, rank, tp_size) for group in groups)
            for rank in range(tp_size)
        )


@dataclass(frozen=True)
class EngineCapacity:
    """What requests could have of an engine in which nothing else runs; never changes."""

    num_blocks: int
    """KV blocks of a layer group, without the null block."""
    max_model_len: int
    """Longest request that is accepted, prompt and output: the last token's KV is never needed."""
    max_request_tokens: int | None
    """Most tokens whose KV one request can come to; None: as many as the context has."""
    max_held_tokens: int | None
    """Most tokens whose KV one request holds at once; None: all that it came to."""


@dataclass(frozen=True)
class EngineLoad:
    num_waiting: int
    num_running: int
    num_reserved: int
    num_exporting: int
    num_queued_tokens: int
    num_free_blocks: int
    num_blocks: int
    num_quarantined_blocks: int
    """Kept from use until another worker has provably stopped, of the layer group that lacks most:
    reservations that it could write still, and exports that it could read."""
    num_quarantined_bytes: int
    """The same of all layer groups, over all layers and ranks."""
    num_steps: int
    prefill_tokens_per_s: float
    decode_step_s: float


class KvSink(Protocol):
    """Receives finished KV on one rank. Must not block: it enqueues.

    One call after the other, on the engine's thread; `layer_done` may come on another one, while
    the engine's computes the step.
    """

    def message(self, payload: bytes) -> None:
        """A sink message of the plan: opens, closes or fences a handoff on this rank."""

    def layer_done(self, layer: int, pushes: Sequence[BlockPush]) -> None:
        """The KV of `pushes`, those of the layer's group, is written for `layer`.

        Called for each layer, in order; not called in a step without pushes.
        """

    def step_done(self) -> None:
        """All layers of the step are done."""


class KvMemory(Protocol):
    """A rank's pool of KV memory, one allocation with regions `region_stride_bytes` apart."""

    @property
    def num_regions(self) -> int: ...

    @property
    def region_stride_bytes(self) -> int: ...

    @property
    def blocks_per_region(self) -> int: ...

    @property
    def buffer(self) -> Any:
        """The whole reservation as bytes, uint8 [num_regions * region_stride_bytes]: an array in
        host memory, or for a model on a GPU a torch tensor, or what it can view, on that device."""


class Runner(Protocol):
    """Runs steps on this process's rank and, as rank 0, makes the other ranks run them too."""

    @property
    def model(self) -> ModelSpec: ...

    @property
    def num_blocks(self) -> int:
        """KV blocks of each layer group over all regions, the null block included."""

    def run(self, plan: StepPlan, specs: dict[RequestId, RequestSpec]) -> list[SampledToken]:
        """One sampled token for each of the plan's sequences with `samples`, in order.

        Gives the plan's sink messages to this rank's KvSink first, then calls `layer_done` after
        each layer and `step_done` at the end. `specs` has every request that samples; where its
        sampling looks at earlier tokens (penalties), `token_ids` are all tokens known now.
        """

    def close(self) -> None: ...


class Engine(Protocol):
    """Rank 0's engine. Not thread-safe; every method returns at once but `step`.

    Two ways in: `add` computes a prompt here; `reserve` sets blocks aside for KV that comes from
    another worker, which `admit` turns into a running request.
    """

    @property
    def model(self) -> ModelSpec: ...

    def add(self, spec: RequestSpec) -> None:
        """Prefill and decode here. Raises InvalidRequestError."""

    def add_prefill(
        self, spec: RequestSpec, handoff_id: HandoffId, num_receiver_cached_tokens: int
    ) -> None:
        """Compute the prompt and one token; push what the receiver lacks as layers finish.

        The request stays pinned after its PrefilledEvent until `release`.
        """

    def reserve(self, spec: RequestSpec) -> ReservedEvent | NoCapacityEvent:
        """Set blocks aside for a prompt whose KV another worker computes; pins what is cached.

        Raises InvalidRequestError when the request could never run here.
        """

    def admit(self, request_id: RequestId, first: SampledToken) -> None:
        """All KV of a reserved request has arrived: run it from its first token on.

        The writer has sent `first` to the caller already: no TokenEvent repeats it. Raises
        UnknownRequestError when nothing is reserved under this id.
        """

    def release(self, request_id: RequestId, quarantine: bool = False) -> None:
        """Let go of a reserved or exported request's blocks; an unknown one has none.

        A prefill that is still computing ends with a FinishedEvent.
        `quarantine`: a late writer could still touch them; they are unusable until `unquarantine`.
        """

    def unquarantine(self, request_id: RequestId) -> None:
        """The writer of a released reservation has provably stopped: its blocks are free."""

    def abort(self, request_id: RequestId) -> None:
        """End a waiting, running or exporting request; one that is unknown is already over.

        A prefill that has started computes no more, but its blocks stay pinned until `release`:
        pushes may still read them. A reserved one is `release(quarantine=True)`d.
        """

    def send_to_sinks(self, payload: bytes) -> None:
        """Deliver a sink message on every rank with the next step."""

    def has_work(self) -> bool:
        """Whether a step would do something now; requests that wait for blocks alone are none."""

    def step(self) -> list[EngineEvent]:
        """Run one step and return what came of it, KV events included."""

    def cached_chains(self) -> list[tuple[BlockHash | None, tuple[BlockHash, ...]]]:
        """Every shareable block, as chains (parent, hashes): the snapshot KV events start from."""

    @property
    def capacity(self) -> EngineCapacity:
        """May be asked on any thread."""

    @property
    def predicted_step_s(self) -> float | None:
        """What the step under way, or the last one, was predicted to take by earlier ones. None:
        it has work of a kind, or far longer prompts, than was ever done here. May be asked on any
        thread."""

    @property
    def blocked_since(self) -> float | None:
        """Since when, in monotonic seconds, no request here could start or go on: others hold the
        blocks or places that all of them wait for. None: one can, or none is there. May be asked
        on any thread."""

    def load(self) -> EngineLoad: ...

    def check_integrity(self) -> None:
        """Raise AssertionError with the values when a block is leaked or owned twice."""


class LocalKvMemory:
    """A zeroed numpy buffer with the regions one after the other; implements `KvMemory`."""

    def __init__(self, num_regions: int, region_bytes: int, blocks_per_region: int) -> None:
        self.num_regions = num_regions
        self.region_stride_bytes = region_bytes
        self.blocks_per_region = blocks_per_region
        self.buffer: npt.NDArray[np.uint8] = np.zeros(num_regions * region_bytes, np.uint8)

    @classmethod
    def of(cls, region: RegionLayout, num_regions: int) -> LocalKvMemory:
        return cls(num_regions, region.num_bytes(), region.num_blocks)


class LocalDeviceMemory:
    """As `LocalKvMemory`, but a torch tensor on the model's device; implements `KvMemory`."""

    def __init__(self, region: RegionLayout, num_regions: int, device: str) -> None:
        import torch  # which a fake engine does without

        self.num_regions = num_regions
        self.region_stride_bytes = region.num_bytes()
        self.blocks_per_region = region.num_blocks
        self.buffer: torch.Tensor = torch.zeros(
            num_regions * self.region_stride_bytes, dtype=torch.uint8, device=device
        )


class LocalSink:
    """The `KvSink` of an engine that hands nothing over: a push would be a mistake."""

    def message(self, payload: bytes) -> None:
        raise AssertionError(f"nobody is there to receive {len(payload)} bytes")

    def layer_done(self, layer: int, pushes: Sequence[BlockPush]) -> None:
        assert not pushes, f"nobody is there to receive {pushes}"

    def step_done(self) -> None:
        pass
