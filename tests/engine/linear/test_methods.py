"""Every method of every format of weights does what `suite` asks, and a harmed one fails there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.models.linear.table import AT_LOAD, FORMATS
from tests.engine.linear.suite import CASES, MODULE, Case, Tensors, Tried, weight_of

SHAPE = (96, 128)
CHECKS: dict[str, Callable[[Tried, int, int], None]] = {
    "products": Tried.check_products,
    "parts": Tried.check_parts,
    "ranks": Tried.check_ranks,
    "gates": Tried.check_gates,
    "bytes": Tried.check_bytes,
    "grouped": Tried.check_grouped,
}


def tried(case: Case) -> list[Tried]:
    """With each method that serves here."""
    found = [
        Tried(case, method, dtype)
        for method in case.kept.methods
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return [one for one in found if one.load([one.read(weight_of(*SHAPE))]) is not None]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_method_conforms(case: Case, check: str) -> None:
    methods = tried(case)
    assert {one.method for one in methods} >= {case.kept.methods[-1]}
    for one in methods:
        CHECKS[check](one, *SHAPE)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("shape", [(32, 32), (100, 160), (96, 3200)])
def test_products_of_other_sizes_conform(shape: tuple[int, int]) -> None:
    """Sums in parts, strips that are not full."""
    for case in (case for case in CASES if shape[1] % case.split == 0):
        for one in tried(case):
            one.check_products(*shape)


def test_all_formats_of_the_table_are_tried() -> None:
    names = {case.kept.name for case in CASES}  # type: ignore[attr-defined]
    assert names == {"floats", *FORMATS, *AT_LOAD}


class Harmed:
    """A method that mixes two rows up."""

    def __init__(self, one: Tried) -> None:
        self._method = one.method

    def load(self, *given: Any, **named: Any) -> Harmed:
        self._linear = self._method.load(*given, **named)
        return self

    def apply(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = self._linear.apply(x, *rest)
        return out[:, [1, 0, *range(2, out.shape[1])]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_method_that_mixes_two_rows_fails(case: Case) -> None:
    for one in tried(case):
        with pytest.raises(AssertionError):
            replace(one, method=Harmed(one)).check_products(*SHAPE)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_format_that_reads_the_wrong_columns_fails(case: Case) -> None:
    class Shifted(Tensors):
        def _part(self, name: str, shape: tuple[int, ...], parts: object) -> torch.Tensor:
            found = super()._part(name, shape, parts)  # type: ignore[arg-type]
            return found if name.endswith("shape") else found.roll(1, dims=-1)

    class Wrong(Tried):
        def read(self, weight: torch.Tensor, *parts: slice) -> object:
            source = Shifted(self.case.stored(weight))
            given = (*parts, slice(None), slice(None))[:2]
            return self.case.kept.read(source, MODULE, tuple(weight.shape), *given)  # type: ignore[arg-type]

    for one in tried(case):
        with pytest.raises(AssertionError):
            Wrong(one.case, one.method, one.dtype).check_products(*SHAPE)
