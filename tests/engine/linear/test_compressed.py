"""Weights are, bit for bit, those that compressed-tensors itself makes of the same tensors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.models.linear.compressed_tensors import CompressedInt8
from tests.engine.linear.make_golden import CASES, GOLDEN, OUTPUTS, read
from tests.engine.linear.suite import MODULE, Tensors


@pytest.mark.parametrize("number", range(len(CASES)))
def test_dequantised_weights_are_the_librarys(number: int) -> None:
    golden: dict[str, Any] = json.loads(GOLDEN.read_text())[number]
    layout, inputs, group, _ = CASES[number]
    assert (golden["layout"], golden["group_size"]) == (layout, group)
    source = Tensors({name: read(plain) for name, plain in golden["tensors"].items()})
    kept, expected = CompressedInt8(layout, group, ("Linear",), ()), read(golden["dequantised"])
    everything = slice(None)
    rows = kept.read(source, MODULE, (OUTPUTS, inputs), everything, everything)
    assert -128 in rows.values
    found = rows.dequantised()
    assert found.dtype == expected.dtype
    assert found.equal(expected)
    wrong = rows.values.clone()
    wrong[1, 5] += 1
    assert not type(rows)(wrong, rows.scales).dequantised().equal(expected)


def test_modules_are_chosen_by_targets_and_ignored_ones() -> None:
    kept = CompressedInt8("int-quantized", None, ("Linear",), ("lm_head", r"re:.*mlp\.gate$"))
    layer = "model.layers.0."
    of = {name: kept.of(name) is kept for name in (f"{layer}mlp.gate_proj", f"{layer}mlp.gate")}
    assert of == {f"{layer}mlp.gate_proj": True, f"{layer}mlp.gate": False}
    assert kept.of("lm_head") is not kept
    assert kept.of("model.embed_tokens") is not kept
    named = CompressedInt8("int-quantized", None, (r"re:.*q_proj", f"{layer}mlp.up_proj"), ())
    assert [named.of(f"{layer}{name}") is named for name in ("self_attn.q_proj", "mlp.up_proj")]
    assert named.of(f"{layer}mlp.down_proj") is not named
