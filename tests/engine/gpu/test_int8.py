"""Products with 8-bit weights on a device, against float64 on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

from engine.models.linear.int8 import Int8Linear, Int8Rows
from engine.models.linear.method import Target

LONGEST_ERROR = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}
"""Of a whole result, relative: ‖out - reference‖ / ‖reference‖."""


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 3, 12])  # groups of 192, 64 and 16 inputs
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_are_those_of_the_definition(
    device: torch.device, dtype: str, groups: int
) -> None:
    generator = torch.Generator().manual_seed(groups)
    outputs, inputs, kind = 100, 192, getattr(torch, dtype)
    values = torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    scales = torch.rand(outputs, groups, generator=generator) * 1e-2 + 1e-3
    bias = torch.randn(outputs, generator=generator).to(kind)
    parts = [Int8Rows(values[:30], scales[:30]), Int8Rows(values[30:], scales[30:])]
    linear = Int8Linear.load(parts, bias.to(device), Target(kind, device), None)
    assert linear is not None
    assert linear.by_triton or (device.type == "cpu" and "TRITON_INTERPRET" not in os.environ)
    weight = (values.double().unflatten(1, (groups, -1)) * scales.double()[:, :, None]).flatten(1)
    for num_rows in (1, 16, 17, 130):
        x = torch.randn(num_rows, inputs, generator=generator).to(kind)
        expected = x.double() @ weight.T + bias.double()
        for out_dtype in (kind, torch.float32):
            found = linear.apply(x.to(device), out_dtype)
            assert found.dtype == out_dtype
            error = (found.cpu().double() - expected).norm() / expected.norm()
            assert error < LONGEST_ERROR[dtype], (num_rows, out_dtype)
