"""The engine's settings. Standard library only: they are read where torch is not installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from baton.config.ranges import Count, NotNegative, Ranged, Share, at_least

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["none", "int8"]

ENGINES = {
    "torch": "engine.run.torch_engine:TorchBuilder",
    "fake": "engine.run.fake_engine:FakeBuilder",
}
"""Engines by name: where each one's `EngineBuilder` is. Here, since a misspelt name is
refused where no engine is installed."""
if TYPE_CHECKING:
    Backend = str
else:
    Backend = Literal[tuple(ENGINES)]

AUTO: Literal["auto"] = "auto"
DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes that an engine computes in."""
_Context = Annotated[int, at_least(2)]  # a prompt, and a token after it
_Factor = Annotated[float, at_least(1)]


@dataclass(frozen=True)
class FakeEngineConfig(Ranged):
    """The fake engine's model and timing."""

    vocab_size: Count = 2048
    max_model_len: _Context = 4096
    window: Count | None = None
    """Tokens that the layers of a second, windowed group look back; None: no such group."""
    prefill_token_s: NotNegative = 0.0
    """Seconds a step takes for each prompt token in it."""
    decode_step_s: NotNegative = 0.0
    """Seconds a step takes that decodes anything."""


@dataclass(frozen=True)
class EngineSettings(Ranged):
    """Limits and sizes of one engine. They set a worker's memory and its longest step."""

    block_size: Count = 16
    """Tokens of one KV block."""
    num_blocks: Count | None = None
    """KV blocks per layer group. None: as many as fit into `kv_memory_bytes`."""
    kv_memory_bytes: Count | None = None
    """Bytes of one rank's KV pool. None: on a GPU what `gpu_memory_utilization` leaves, on a CPU
    256 MiB."""
    gpu_memory_utilization: Share = 0.9
    """Fraction of a GPU's memory for weights, the largest step and KV together."""
    max_num_seqs: Count = 64
    """Most requests that run at once."""
    max_num_batched_tokens: Count = 512
    """Token budget of a step; longer prompts are prefilled in chunks. At least `max_num_seqs`: each
    running request takes a token of it before any prompt does."""
    max_itl_factor: _Factor | None = 4.0
    """A step with prompts beside running streams may take at most so many times what the streams'
    decodes alone would take, or one block of prompt. So a stream's gaps between tokens (ITL) stay
    within this factor, and higher values prefill faster beside decodes. None: only
    `max_num_batched_tokens` bounds a step."""
    max_model_len: _Context | None = None
    """Most tokens of a prompt and its output together. None: the model's own limit."""
    dtype: Dtype = "auto"
    """What weights, activations and KV are computed in: bfloat16, float16 or float32. auto: the
    checkpoint's own, or float32 where a device of the cluster has no instructions for it
    (`engine.dtype`)."""
    device: Device = "auto"
    """Where the engine computes: cpu or cuda. auto: a GPU where torch can use one, else the CPU; on
    Kubernetes a GPU where the pool's pod template asks for one."""
    quantization: Quantization = "none"
    """none: weights as the checkpoint has them; int8: 8-bit weights with a scale an output, made of
    floating-point ones while they load. A model's pools must agree."""
    num_threads: Count | None = None
    """Compute threads of one rank. None: the machine's cores divided among its ranks."""
    prefix_cache: bool = True
    """Whether KV of earlier prompts is kept and used again for prompts that begin alike."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), not"
                f" {self.max_num_batched_tokens}: each running request may need a token of a step"
            )


@dataclass(frozen=True)
class EngineTuning(Ranged):
    """Engine settings for tests and benchmarks."""

    num_regions: Count = 4
    """Separately registered parts of the KV pool."""
    backend: Backend = "torch"
    """What computes: torch, or fake, which makes deterministic tokens without a model."""
    fake: FakeEngineConfig = FakeEngineConfig()

    @property
    def reads_model(self) -> bool:
        """Whether it reads a model and computes on a device, in some dtype."""
        return self.backend != "fake"


@dataclass(frozen=True)
class EngineConfig(EngineTuning, EngineSettings):
    """All settings of one engine."""

    @property
    def needs_gpu(self) -> bool:
        return self.device == "cuda" and self.reads_model
