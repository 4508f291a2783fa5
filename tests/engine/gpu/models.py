"""The families' tiny models on a device, and what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from baton.config.engine import EngineConfig
from bench.random_model import random_model
from engine.api import Engine
from engine.kernels.native.native_kernels import pick_kernels
from engine.kernels.paged_kv import TORCH_DTYPES
from engine.request import SamplingParams
from engine.run.build import lone_engine
from engine.run.torch_engine import TorchModel
from tests.engine.families import VOCAB, hf_config, random_weight
from tests.engine.greedy import Greedy, run_alone

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)


def config_on(device: torch.device, dtype: str = "float32", **changes: object) -> EngineConfig:
    settings = {"num_blocks": 160, "max_num_seqs": 8, "max_num_batched_tokens": 48, **changes}
    return EngineConfig(dtype=dtype, device=device.type, **settings)  # type: ignore[arg-type]


def engine_on(device: torch.device, family: str, config: EngineConfig) -> Engine:
    """The same weights on every device. The kernels are those that serve on a GPU."""
    kernels = pick_kernels(torch.device("cuda"), TORCH_DTYPES[config.dtype])
    spec, decoder = random_model(
        hf_config(family),
        config.dtype,
        device,
        block_size=config.block_size,
        weight_of=partial(random_weight, family),
        drawn_on=CPU,
        kernels=kernels,
    )
    return lone_engine(TorchModel.sized(spec, config, decoder))


def reference_engine(family: str, config: EngineConfig) -> Engine:
    """In float32 on the CPU, with the CPU's own kernels."""
    spec, decoder = random_model(
        hf_config(family),
        "float32",
        CPU,
        block_size=config.block_size,
        weight_of=partial(random_weight, family),
    )
    config = config_on(CPU, block_size=config.block_size)
    return lone_engine(TorchModel.sized(spec, config, decoder))


def prompts_of(lengths: Sequence[int]) -> list[np.ndarray]:
    return [
        np.random.default_rng(length).integers(0, VOCAB, length).astype(np.uint32)
        for length in lengths
    ]


def answers(
    engine: Engine, prompts: Sequence[np.ndarray], sampling: SamplingParams = GREEDY
) -> list[Greedy]:
    """All prompts together, in chunks."""
    return [Greedy.of(tokens) for tokens in run_alone(engine, prompts, sampling)]


def likeliest(engine: Engine, prompts: Sequence[np.ndarray]) -> list[dict[int, float]]:
    """Log-probabilities of the 20 likeliest first tokens of each prompt."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)
    found = run_alone(engine, prompts, sampling)
    return [dict(token.logprobs.top) for (token,) in found if token.logprobs is not None]
