"""Numbers that compressed-tensors itself quantised, packed and dequantised, for `test_compressed`.

    pip install compressed-tensors==0.20.0
    python -m tests.engine.linear.make_golden

Written to `compressed_tensors.json`: of each case the tensors of a module `m`, and its weight.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

GOLDEN = Path(__file__).with_name("compressed_tensors.json")
# Layout, inputs (34: the last word of four is not full), inputs of a group, type of the scales.
CASES = (
    ("pack-quantized", 34, None, "bfloat16"),
    ("pack-quantized", 64, 32, "float32"),
    ("int-quantized", 34, None, "float16"),
    ("int-quantized", 64, 32, "bfloat16"),
)
OUTPUTS = 3


def made(layout: str, inputs: int, group: int | None, scales: str) -> dict[str, Any]:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    dtype = getattr(torch, scales)
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(OUTPUTS, inputs, generator=generator)
    weight[0, 3] = -5.0  # the largest of its row and below 0: -128
    groups = weight.unflatten(1, (-1, group or inputs))
    scale = (groups.abs().amax(-1) / 129).to(dtype)  # the largest are cut off
    strategy = "channel" if group is None else "group"
    weights = QuantizationArgs(num_bits=8, symmetric=True, strategy=strategy, group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor: Any = BaseCompressor.get_value_from_registry(layout)
    state = {"weight": weight.to(dtype), "weight_scale": scale}
    compressed = compressor.compress(state, scheme)
    found = compressor.decompress(compressed, scheme)["weight"]
    return {
        "layout": layout,
        "group_size": group,
        "tensors": {f"m.{name}": _plain(tensor) for name, tensor in compressed.items()},
        "dequantised": _plain(found),
    }


def _plain(tensor: torch.Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "values": tensor.tolist()}


def read(plain: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(plain["values"], dtype=getattr(torch, plain["dtype"]))


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps([made(*case) for case in CASES]) + "\n")
