"""Sparse MLPs: all experts in one product, as a device wants it, and one after the other."""

from __future__ import annotations

import pytest
import torch

from engine.attention.torch_kernels import TorchKernels
from engine.models.config import MoeConfig
from engine.models.mlp import DenseMlp, ExpertLoop, GroupedExperts, GroupedLinear, Linear, MoeMlp

NUM_EXPERTS, HIDDEN, WIDTH = 6, 32, 48
CONFIG = MoeConfig((0,), NUM_EXPERTS, 2, WIDTH, True, "mlp", ("gate", "up", "down"))


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_experts_in_one_product_give_what_they_give_one_by_one(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    gate_up, down = random(NUM_EXPERTS, 2 * WIDTH, HIDDEN), random(NUM_EXPERTS, HIDDEN, WIDTH)
    router = random(NUM_EXPERTS, HIDDEN)
    router[2] = -9 * random(HIDDEN).abs()  # nobody's choice: a group without rows
    one_by_one = ExpertLoop([DenseMlp(Linear(up), Linear(back)) for up, back in zip(gate_up, down)])
    at_once = GroupedExperts(GroupedLinear(gate_up), GroupedLinear(down))
    x = random(num_tokens, HIDDEN).abs()
    one, other = (
        MoeMlp(CONFIG, router, experts)(x, TorchKernels()) for experts in (one_by_one, at_once)
    )
    assert one.abs().mean() > 1e-3
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    alone = torch.cat([MoeMlp(CONFIG, router, at_once)(row[None], TorchKernels()) for row in x])
    torch.testing.assert_close(alone, other, rtol=1e-5, atol=1e-7)
