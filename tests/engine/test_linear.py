"""Matrix products in bf16, packed where the CPU can, against a reference in float32, per output."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.native.native_kernels import pick_kernels
from engine.kernels.native.packed_weights import PackedWeight
from engine.kernels.protocol import Activation, Kernels
from engine.kernels.torch.torch_kernels import TorchKernels
from engine.models.config import MoeConfig
from engine.models.linear.dense import GroupedLinear
from engine.models.linear.floats import FLOATS
from engine.models.linear.method import Linear, Target, load_linear
from engine.models.mlp import DenseMlp, ExpertLoop, GroupedExperts, MoeMlp, experts_of

BF16, SILU = torch.bfloat16, Activation.SILU
# bf16 has 8 bits: of each output, against the largest of its row.
TOLERANCE = 8e-3
# What experts are weighted by, the gate, its product and the sum are rounded too.
MOE_TOLERANCE = 2e-2
NUM_EXPERTS = 5


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of any output, as a part of the largest output of its row."""
    assert found.dtype == BF16
    assert found.shape == expected.shape
    assert found.isfinite().all()
    scale = expected.abs().amax(dim=-1, keepdim=True)
    return float(((found.float() - expected).abs() / scale).max())


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    return load_linear(FLOATS, [weight], bias, Target(weight.dtype, weight.device))


class Random:
    """Normal values that bf16 holds, the same in every run."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self._generator = torch.Generator().manual_seed(seed)

    def values(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self._generator) * scale).bfloat16()

    def weight(self, *shape: int) -> torch.Tensor:
        return self.values(*shape, scale=shape[-1] ** -0.5)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (33, 65), (256, 96), (129, 1025), (1000, 31)])
def test_linear_is_that_of_the_definition(shape: tuple[int, int], with_bias: bool) -> None:
    random = Random(0)
    weight = random.weight(*shape)
    bias = random.values(shape[0]) if with_bias else None
    linear = linear_of(weight, bias)
    assert (linear.native is not None) == (shape[1] % 32 == 0)
    for num_rows in (1, 2, 3, 15, 16, 17, 64, 257):
        x = random.values(num_rows, shape[1])
        expected = torch.nn.functional.linear(
            x.float(), weight.float(), None if bias is None else bias.float()
        )
        error = relative_error(linear.apply(x), expected)
        assert error < TOLERANCE, (num_rows, error)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("dtype", "stored"), [(BF16, BF16), (torch.float32, BF16), (torch.float32, torch.float32)]
)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_packed_products_are_those_of_the_definition(
    dtype: torch.dtype, stored: torch.dtype, num_threads: int
) -> None:
    random = Random(2)
    torch.set_num_threads(num_threads)
    tolerance = TOLERANCE if dtype == BF16 else 1e-5
    for outputs, inputs in ((32, 32), (96, 64), (100, 160), (544, 3200)):  # long: sums in parts
        parts = [part.to(stored) for part in random.weight(outputs, inputs).split((7, outputs - 7))]
        bias = random.values(outputs)
        packed = PackedWeight(parts, bias, dtype, None)
        for num_rows in (1, 2, 3, 16, 17, 40, 600):
            x = random.values(num_rows, inputs).to(dtype)
            expected = torch.nn.functional.linear(x.float(), torch.cat(parts).float(), bias.float())
            scale = expected.abs().amax(dim=-1, keepdim=True)
            for out_dtype, limit in ((None, tolerance), (torch.float32, 1e-5)):
                error = (packed.apply(x, out_dtype).float() - expected).abs() / scale
                assert error.max() < limit, (outputs, inputs, num_rows, out_dtype)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("gate_with", list(Activation))
def test_a_gated_product_is_that_of_its_first_half_times_the_second(
    gate_with: Activation, dtype: torch.dtype
) -> None:
    random = Random(3)
    gate, up, bias = random.weight(48, 64), random.weight(48, 64), random.values(96)
    packed = PackedWeight([gate, up], bias, dtype, gate_with)
    for num_rows in (1, 5, 33):
        x = random.values(num_rows, 64).to(dtype)
        wide, offset = x.float(), bias.float().chunk(2)
        gates = torch.cat((wide @ gate.float().T + offset[0], torch.ones(num_rows, 48)), dim=1)
        expected = TorchKernels().gate(gates, gate_with) * (wide @ up.float().T + offset[1])
        error = (packed.apply(x).float() - expected).abs().amax(-1) / expected.abs().amax(-1)
        assert error.max() < (TOLERANCE if dtype == BF16 else 1e-5), num_rows


def test_one_wrong_weight_row_is_far_above_the_tolerance() -> None:
    random = Random(1)
    weight, x = random.weight(129, 257), random.values(3, 257)
    expected = x.float() @ weight.float().T
    wrong = weight.clone()
    wrong[77] = weight[78]
    assert relative_error(linear_of(wrong).apply(x), expected) > 4 * TOLERANCE


@pytest.fixture(params=["torch", "picked"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return TorchKernels() if request.param == "torch" else pick_kernels(torch.device("cpu"), BF16)


class SparseMlp:
    """A sparse MLP's weights, what computes with them in bf16, and what float32 says."""

    def __init__(self, hidden: int, width: int, per_token: int) -> None:
        names = ("gate", "up", "down")
        self.config = MoeConfig((0,), NUM_EXPERTS, per_token, width, True, "mlp", names)
        self.random = Random(hidden)
        self.router = self.random.weight(NUM_EXPERTS, hidden)
        self.gate_up = self.random.weight(NUM_EXPERTS, 2 * width, hidden)
        self.down = self.random.weight(NUM_EXPERTS, hidden, width)

    def built(self) -> MoeMlp:
        experts = [
            DenseMlp(linear_of(up), linear_of(down), SILU)
            for up, down in zip(self.gate_up, self.down)
        ]
        return MoeMlp(self.config, self.router, experts_of(experts))

    def tokens(self, num_rows: int) -> torch.Tensor:
        """Such whose experts are clear: a choice must not hang on how bf16 rounds the logits."""
        count = self.config.num_experts_per_token
        x = self.random.values(2 * num_rows + 20, self.router.shape[1])
        logits = (x.float() @ self.router.float().T).sort(dim=-1, descending=True).values
        clear = x[logits[:, count - 1] - logits[:, count] > 0.05]
        assert len(clear) >= num_rows
        return clear[:num_rows]

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Token by token, from the definition."""
        rows = []
        for token in x.float():
            weights, chosen = (
                (self.router.float() @ token).softmax(-1).topk(self.config.num_experts_per_token)
            )
            row = torch.zeros_like(token)
            for weight, expert in zip(weights / weights.sum(), chosen.tolist()):
                gate, up = (self.gate_up[expert].float() @ token).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                row += weight * (self.down[expert].float() @ inner)
            rows.append(row)
        return torch.stack(rows)


@pytest.mark.parametrize("sizes", [(64, 48, 2), (33, 17, 1), (129, 80, 3)])
def test_sparse_mlp_is_that_of_the_definition(
    kernels: Kernels, sizes: tuple[int, int, int]
) -> None:
    mlp = SparseMlp(*sizes)
    for num_rows in (1, 2, 3, 17, 100):
        x = mlp.tokens(num_rows)
        error = relative_error(mlp.built()(x, kernels), mlp.reference(x))
        assert error < MOE_TOLERANCE, (num_rows, error)


@pytest.mark.parametrize("wrong", ["gate_up", "down", "router"])
def test_one_wrong_weight_row_of_a_sparse_mlp_is_far_above_the_tolerance(wrong: str) -> None:
    mlp = SparseMlp(64, 48, 2)
    x = mlp.tokens(60)
    expected = mlp.reference(x)
    rows = getattr(mlp, wrong).view(-1, getattr(mlp, wrong).shape[-1])
    rows[3] = rows[2]
    assert relative_error(mlp.built()(x, TorchKernels()), expected) > 4 * MOE_TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_experts_in_one_product_give_what_they_give_one_by_one(num_tokens: int) -> None:
    hidden, width = 32, 48
    config = MoeConfig((0,), NUM_EXPERTS, 2, width, True, "mlp", ("gate", "up", "down"))
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    gate_up, down = random(NUM_EXPERTS, 2 * width, hidden), random(NUM_EXPERTS, hidden, width)
    router = random(NUM_EXPERTS, hidden)
    router[2] = -9 * random(hidden).abs()  # nobody's choice: a group without rows
    one_by_one = ExpertLoop(
        [DenseMlp(linear_of(up), linear_of(back), SILU) for up, back in zip(gate_up, down)]
    )
    at_once = GroupedExperts(GroupedLinear(gate_up), GroupedLinear(down), SILU)
    x = random(num_tokens, hidden).abs()
    one, other = (
        MoeMlp(config, router, experts)(x, TorchKernels()) for experts in (one_by_one, at_once)
    )
    assert one.abs().mean() > 1e-3
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    alone = torch.cat([MoeMlp(config, router, at_once)(row[None], TorchKernels()) for row in x])
    torch.testing.assert_close(alone, other, rtol=1e-5, atol=1e-7)
