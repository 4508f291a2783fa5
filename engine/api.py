"""The engine's seams: what a worker drives (`Engine`), what runs a step (`Runner`), where finished
KV goes (`KvSink`).

An engine belongs to one thread. `engine.loop.EngineThread` provides the thread, carries commands in
and events out. `engine.run.core.EngineCore` is a scheduler and block pool over a `Runner`, torch or
fake; another engine may bring its own scheduler. `engine.engines` finds engines by name.
The `Local` classes serve an engine that hands nothing over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from baton.config.engine import EngineConfig
from engine.request import (
    BlockPush,
    EngineEvent,
    HandoffId,
    RequestId,
    RequestSpec,
    SampledToken,
    Scores,
    StepPlan,
)
from engine.request import EngineLoad as EngineLoad
from kv_transfer.layout import KvLayout, RegionLayout

_HOST_KV_BYTES = 256 << 20


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
    dtype: str = ""
    """What it computes in; empty: it computes nothing."""

    def block_bytes(self, tp_size: int) -> int:
        """Bytes of one KV block over all layer groups, at the TP rank that holds most."""
        return max(self.layout.rank_bytes(rank, tp_size) for rank in range(tp_size))

    def region_layout(self, config: EngineConfig, tp_rank: int, tp_size: int) -> RegionLayout:
        """Lay out a rank's regions, of equal size. `kv_memory_bytes` and `num_blocks` are per rank,
        and every rank has the same number of blocks.

        Raises ValueError when a region cannot hold even one block.
        """
        kv_memory_bytes = config.kv_memory_bytes or _HOST_KV_BYTES
        if config.num_blocks is None:
            per_region = kv_memory_bytes // self.block_bytes(tp_size) // config.num_regions
        else:
            per_region = -(-config.num_blocks // config.num_regions)
        if per_region < 1:
            raise ValueError(
                f"kv_memory_bytes={kv_memory_bytes} holds no {config.num_regions} blocks of KV"
            )
        return RegionLayout(self.layout, tp_rank, tp_size, per_region)


@dataclass(frozen=True)
class EngineCapacity:
    """What one request could use if nothing else ran. Never changes."""

    num_blocks: int
    """KV blocks of a layer group, without the null block."""
    max_model_len: int
    """Longest request that is accepted, prompt and output. The last token's KV is never needed."""
    max_request_tokens: int | None
    """Most tokens whose KV one request can need; None: the whole context."""
    max_held_tokens: int | None
    """Most tokens whose KV one request holds at once; None: all of its tokens."""


class KvSink(Protocol):
    """Receives finished KV on one rank. Must not block: it enqueues.

    Calls never overlap. They come on the engine's thread, except that `layer_done` may come on
    another one while the engine computes the step.
    """

    def message(self, payload: bytes) -> None:
        """Take a message of the plan: the opening of a handoff in which this rank has a part."""

    def layer_done(self, layer: int, pushes: Sequence[BlockPush]) -> None:
        """`layer` is written for the blocks of `pushes`, which are those of its group.

        Called for each layer, in order. Not called in a step without pushes.
        """

    def step_done(self) -> None:
        """Note that all layers of the step are done."""


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
        """The whole pool as bytes, uint8 [num_regions * region_stride_bytes]: an array in host
        memory, or a torch tensor on the model's GPU."""


@dataclass(frozen=True)
class Masks:
    """Which tokens a step's constrained rows may sample."""

    rows: tuple[int, ...]
    """Among the sequences that sample."""
    bits: npt.NDArray[np.uint8]
    """[len(rows), at least vocab_size / 8]: token t of a row is bit t % 8 of byte t // 8."""
    faults: Mapping[int, str]
    """Rows whose constraint failed, and why. They are not among `rows`."""


ComputeMasks = Callable[[], Masks]
"""To be called once, before the step is committed."""


class Runner(Protocol):
    """Runs steps on this process's rank and, as rank 0, makes the other ranks run them too."""

    @property
    def model(self) -> ModelSpec: ...

    @property
    def num_blocks(self) -> int:
        """KV blocks of each layer group over all regions, the null block included."""

    def run(
        self,
        plan: StepPlan,
        specs: dict[RequestId, RequestSpec],
        masks: ComputeMasks | None = None,
        scores: Scores | None = None,
    ) -> list[SampledToken]:
        """Run a step. Returns a token for each of the plan's sequences with `samples`, in order.

        Passes the plan's sink messages to this rank's KvSink first. Calls `layer_done` after each
        layer and `step_done` at the end. `specs` has every request that samples, with all tokens
        known now if sampling uses earlier ones. `masks`: what rows with a constraint may sample,
        computed while the device runs the model. `scores` is filled.
        """

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineHealth:
    """How the running step does. An engine that knows neither leaves both None."""

    predicted_step_s: float | None = None
    """Predicted time of the current step, or of the last one. None: this kind of work, or prompts
    this long, were never measured here."""
    blocked_since: float | None = None
    """Monotonic time since which no request here could start or continue, because others hold the
    blocks or slots that all of them wait for. None: one can run, or there is none."""


class Engine(Protocol):
    """Rank 0's engine. Not thread-safe. Every method but `start`, `prepare` and `step` returns at
    once: what takes longer is answered by an event of a later `step`.

    A request enters in three ways. `add` computes its prompt and its output here. `add_prefill`
    computes its prompt for another worker. `reserve` sets blocks aside for KV from another worker,
    and `admit` then runs it. All three raise InvalidRequestError for one that could never run here.

    Another worker may read or write the blocks of a request of the last two kinds, so they have
    this life:

    1. They are the request's from its start, or its ReservedEvent, on.
    2. `abort` ends the request at once, but its blocks stay set aside. Nobody else gets them.
    3. `release` says that the other worker has provably stopped. Only now are they free.

    A request id may come again once its request has ended and its blocks are free.
    """

    @property
    def capacity(self) -> EngineCapacity:
        """What one request could use. Any thread may read it."""

    @property
    def health(self) -> EngineHealth:
        """How the running step does. Any thread may read it, also while a step runs."""

    def start(self, wake: Callable[[], None]) -> None:
        """Warm up, before the first request, on the thread that steps. Raises what a step raises.

        An engine that computes on threads of its own calls `wake` from there, whenever `has_work`
        has become true.
        """

    def prepare(self, spec: RequestSpec) -> None:
        """On any thread: do beforehand what may take long when the request enters, which is to
        compile its grammar. Raises InvalidRequestError."""

    def add(self, spec: RequestSpec) -> None:
        """Take a request in that is prefilled and decoded here."""

    def add_prefill(
        self,
        spec: RequestSpec,
        handoff_id: HandoffId,
        num_receiver_cached_tokens: int,
        opening: bytes = b"",
    ) -> None:
        """Compute the prompt and one token; push what the receiver lacks as layers finish.

        `opening` goes to `KvSink.message` of every rank before the first push. The request ends
        with its PrefilledEvent. Its blocks stay until `release`, since pushes may still read them.
        """

    def reserve(self, spec: RequestSpec) -> None:
        """Set blocks aside for a prompt that another worker computes, and pin its cached blocks.

        A ReservedEvent or NoCapacityEvent answers, in a later step if blocks may come free.
        """

    def admit(self, request_id: RequestId, first: SampledToken) -> None:
        """Run a reserved request from its first token on: all of its KV has arrived.

        The writer has sent `first` to the caller. An engine that must compute it again sends a
        TokenEvent with its index; the caller counts a difference, and `first` stands. Raises
        UnknownRequestError when nothing is reserved under this id.
        """

    def abort(self, request_id: RequestId) -> None:
        """End a request at once, with a FinishedEvent unless it has ended. Does nothing for an
        unknown one. Blocks that another worker may touch stay set aside until `release`."""

    def release(self, request_id: RequestId) -> None:
        """No other worker touches this request's blocks any more: free them. Ends a request that
        has not ended, as `abort` does. Does nothing for an unknown one."""

    def has_work(self) -> bool:
        """Whether a step would do something now. Requests that wait for blocks do not count. Does
        not wait for a thread that may call `wake`."""

    def step(self) -> list[EngineEvent]:
        """Advance, and return what happened since the last step, KV events included. Answers are
        returned at once: they do not wait for a computation."""

    def load(self) -> EngineLoad: ...

    def check_integrity(self) -> None:
        """Raise AssertionError with the values when a block is leaked or owned twice."""

    def close(self) -> None:
        """Free everything, after the last step."""


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
