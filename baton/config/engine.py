"""The engine's settings. Standard library only: they are read where torch is not installed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
Backend = Literal["torch", "fake"]

AUTO: Literal["auto"] = "auto"
DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes that an engine computes in."""
_CHOICES = {
    "dtype": get_args(Dtype),
    "device": get_args(Device),
    "backend": get_args(Backend),
}
_LEAST = {"max_model_len": 2}  # a prompt, and a token after it


def _check(config: Any) -> None:
    """Every whole number here counts or sizes something."""
    for name, value in vars(config).items():
        if name in _CHOICES and value not in _CHOICES[name]:
            raise ValueError(f"{name} must be one of {', '.join(_CHOICES[name])}, not {value!r}")
        least = _LEAST.get(name, 1)
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")


@dataclass(frozen=True)
class FakeEngineConfig:
    """The fake engine's model and timing."""

    vocab_size: int = 2048
    max_model_len: int = 4096
    window: int | None = None
    """Tokens that the layers of a second, windowed group look back; None: no such group."""
    prefill_token_s: float = 0.0
    """Seconds a step takes for each prompt token in it."""
    decode_step_s: float = 0.0
    """Seconds a step takes that decodes anything."""

    def __post_init__(self) -> None:
        _check(self)
        for name in ("prefill_token_s", "decode_step_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must not be negative, and finite")


@dataclass(frozen=True)
class EngineSettings:
    """Limits and sizes of one engine. They set a worker's memory and its longest step."""

    block_size: int = 16
    """Tokens of one KV block."""
    num_blocks: int | None = None
    """KV blocks per layer group. None: as many as fit into `kv_memory_bytes`."""
    kv_memory_bytes: int | None = None
    """Bytes of one rank's KV pool. None: on a GPU what `gpu_memory_utilization` leaves, on a CPU
    256 MiB."""
    gpu_memory_utilization: float = 0.9
    """Fraction of a GPU's memory for weights, the largest step and KV together."""
    max_num_seqs: int = 64
    """Requests running at once."""
    max_num_batched_tokens: int = 512
    """Token budget of a step; longer prompts are prefilled in chunks. At least `max_num_seqs`: each
    running request takes a token of it before any prompt does."""
    max_model_len: int | None = None
    """Prompt plus output tokens; None: the model's own limit."""
    dtype: Dtype = "auto"
    """bfloat16, float16 or float32, of weights, activations and KV; auto: the checkpoint's own,
    but float32 where a device of the cluster has no instructions for it (`engine.dtype`)."""
    device: Device = "auto"
    """cpu or cuda; auto: a GPU where torch can use one, else the CPU. On Kubernetes: a GPU where
    the pool's pod template asks for one."""
    num_threads: int | None = None
    """Compute threads of one rank; None: the machine's cores divided among its ranks."""
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        _check(self)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                "gpu_memory_utilization must be more than 0 and at most 1, not"
                f" {self.gpu_memory_utilization}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), not"
                f" {self.max_num_batched_tokens}: each running request may need a token of a step"
            )


@dataclass(frozen=True)
class EngineTuning:
    """Engine settings for tests and benchmarks."""

    num_regions: int = 4
    """Separately registered parts of the KV pool."""
    backend: Backend = "torch"
    """torch, or fake: deterministic tokens without a model."""
    fake: FakeEngineConfig = FakeEngineConfig()

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class EngineConfig(EngineTuning, EngineSettings):
    """All settings of one engine."""

    def __post_init__(self) -> None:
        EngineTuning.__post_init__(self)
        EngineSettings.__post_init__(self)
