"""What every format of weights and every method of it must do, whatever it is.

A new format adds a line to `CASES`; `test_methods` runs all of this with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.kernels.protocol import Activation
from engine.kernels.torch.torch_kernels import TorchKernels
from engine.models.linear.compressed_tensors import CompressedInt8
from engine.models.linear.floats import FLOATS
from engine.models.linear.int8 import Int8AtLoad, quantise
from engine.models.linear.method import Linear, Method, Part, Target, WeightFormat

MODULE = "m"
ALL = slice(None)
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
"""Of an output, as a part of the largest of its row: what the products' own type keeps."""
NUM_ROWS = (1, 2, 7, 8, 9, 17, 40, 600)
"""Rows of activations: decodes, and enough for every block of a kernel."""


@dataclass(frozen=True)
class Tensors:
    """A `MatrixSource` of one module's tensors."""

    tensors: Mapping[str, torch.Tensor]

    def floats(self, name: str, shape: tuple[int, ...], *parts: slice) -> torch.Tensor:
        assert self.tensors[name].is_floating_point()
        return self._part(name, shape, parts)

    def integers(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *parts: slice
    ) -> torch.Tensor:
        assert self.tensors[name].dtype == dtype
        return self._part(name, shape, parts)

    def _part(self, name: str, shape: tuple[int, ...], parts: Sequence[slice]) -> torch.Tensor:
        assert self.tensors[name].shape == shape, name
        return self.tensors[name][tuple(parts)]


@dataclass(frozen=True)
class Case:
    """A format, and how a checkpoint has a weight in it."""

    name: str
    kept: WeightFormat
    stored: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
    meant: Callable[[torch.Tensor], torch.Tensor]
    """The numbers that the products must be those of, as float32."""
    split: int = 1
    """Inputs that must stay together when ranks split them."""
    errors: Mapping[torch.dtype, float] = field(default_factory=lambda: ERRORS)


def int8_tensors(
    weight: torch.Tensor, layout: str, group: int | None, scales: torch.dtype
) -> dict[str, torch.Tensor]:
    """As compressed-tensors keeps it; `test_compressed` compares with the library itself."""
    groups = weight.float().unflatten(1, (-1, group or weight.shape[1]))
    scale = (groups.abs().amax(-1) / 127.5).to(scales)
    values = (groups / scale.float()[:, :, None]).round().clamp(-128, 127).to(torch.int8).flatten(1)
    found = {f"{MODULE}.weight_scale": scale}
    if layout == "int-quantized":
        return found | {f"{MODULE}.weight": values}
    full = torch.nn.functional.pad(values.view(torch.uint8) ^ 128, (0, -values.shape[1] % 4))
    shape = torch.tensor(weight.shape)
    return found | {
        f"{MODULE}.weight_packed": full.contiguous().view(torch.int32),
        f"{MODULE}.weight_shape": shape,
    }


def int8_meant(weight: torch.Tensor, group: int | None, scales: torch.dtype) -> torch.Tensor:
    tensors = int8_tensors(weight, "int-quantized", group, scales)
    values, scale = tensors[f"{MODULE}.weight"].float(), tensors[f"{MODULE}.weight_scale"].float()
    return (values.unflatten(1, (-1, group or weight.shape[1])) * scale[:, :, None]).flatten(1)


def compressed(
    layout: str, group: int | None, scales: torch.dtype, *, rounds: bool = False
) -> Case:
    """`rounds`: groups of many rows, and torch's products, round weights to bf16."""
    kept = CompressedInt8(layout, group, ("Linear",), ())
    split = group or (4 if layout == "pack-quantized" else 1)
    errors = {**ERRORS, torch.bfloat16: 2 * ERRORS[torch.bfloat16]}
    return Case(
        f"{layout} {group} {scales}",
        kept,
        lambda weight: int8_tensors(weight, layout, group, scales),
        lambda weight: int8_meant(weight, group, scales),
        split,
        errors,
    )


def _named(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{MODULE}.weight": weight}


CASES = (
    Case("float32", FLOATS, _named, lambda weight: weight),
    Case("bfloat16", FLOATS, lambda w: _named(w.bfloat16()), lambda w: w.bfloat16().float()),
    Case(
        "int8 at load",
        Int8AtLoad(),
        _named,
        lambda weight: quantise(weight).dequantised(),
        errors={**ERRORS, torch.bfloat16: 2 * ERRORS[torch.bfloat16]},
    ),
    compressed("pack-quantized", None, torch.bfloat16),
    compressed("pack-quantized", 32, torch.float32),
    compressed("int-quantized", None, torch.float16),
    compressed("int-quantized", 64, torch.bfloat16),
)


def weight_of(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(outputs * inputs + seed)
    return torch.randn(outputs, inputs, generator=generator) * inputs**-0.5


def activations(rows: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + inputs)
    return torch.randn(rows, inputs, generator=generator).to(dtype)


@dataclass(frozen=True)
class Tried:
    """One method of one format, for activations of one type."""

    case: Case
    method: Method
    dtype: torch.dtype

    def read(self, weight: torch.Tensor, rows: slice = ALL, columns: slice = ALL) -> Part:
        outputs, inputs = weight.shape
        source = Tensors(self.case.stored(weight))
        return self.case.kept.read(source, MODULE, (outputs, inputs), rows, columns)

    def load(
        self,
        parts: Sequence[Part],
        bias: torch.Tensor | None = None,
        gate: Activation | None = None,
    ) -> Linear | None:
        target = Target(self.dtype, torch.device("cpu"))
        return self.method.load(parts, bias, target, gate)

    def check(self, found: torch.Tensor, expected: torch.Tensor, *more: object) -> None:
        """Close to what float32 says, and finite."""
        assert found.shape == expected.shape
        assert found.isfinite().all()
        scale = expected.abs().amax(dim=-1, keepdim=True)
        error = float(((found.float() - expected).abs() / scale).max())
        assert error < self.case.errors[self.dtype], (self.case.name, error, *more)

    def check_products(self, outputs: int, inputs: int) -> None:
        """x @ weight.T + bias of the definition, in x's type and in float32."""
        weight = weight_of(outputs, inputs)
        bias = activations(1, outputs, self.dtype)[0]
        for given in (None, bias):
            linear = self.load([self.read(weight)], given)
            assert linear is not None
            for num_rows in NUM_ROWS:
                x = activations(num_rows, inputs, self.dtype)
                expected = x.float() @ self.case.meant(weight).T
                expected += 0 if given is None else given.float()
                for out_dtype in (self.dtype, torch.float32):
                    found = linear.apply(x, out_dtype)
                    assert found.dtype == out_dtype
                    self.check(found, expected, num_rows, out_dtype)

    def check_parts(self, outputs: int, inputs: int) -> None:
        """Parts of rows give what the whole gives, bit for bit."""
        weight, cut = weight_of(outputs, inputs), outputs // 3
        whole = self.load([self.read(weight)])
        parts = self.load([self.read(weight, rows) for rows in (slice(0, cut), slice(cut, None))])
        assert whole is not None
        assert parts is not None
        for num_rows in (1, 9):
            x = activations(num_rows, inputs, self.dtype)
            assert whole.apply(x).equal(parts.apply(x))

    def check_ranks(self, outputs: int, inputs: int) -> None:
        """Two ranks' rows lie side by side, their columns' products add up."""
        weight, expected = weight_of(outputs, inputs), None
        x = activations(5, inputs, self.dtype)
        expected = x.float() @ self.case.meant(weight).T
        half = outputs // 2
        rows = [self.load([self.read(weight, each)]) for each in (slice(half), slice(half, None))]
        found = [linear.apply(x, torch.float32) for linear in rows if linear is not None]
        self.check(torch.cat(found, dim=1), expected, "rows")
        cut = inputs // 2 // self.case.split * self.case.split
        total = torch.zeros_like(expected)
        for columns in (slice(0, cut), slice(cut, inputs)):
            linear = self.load([self.read(weight, ALL, columns)])
            if linear is not None:
                total += linear.apply(x[:, columns], torch.float32)
        self.check(total, expected, "columns")

    def check_gates(self, outputs: int, inputs: int) -> None:
        """With gates the product is gate(first half) * second, or as without them."""
        first, second = weight_of(outputs, inputs, 1), weight_of(outputs, inputs, 2)
        for gate in Activation:
            linear = self.load([self.read(first), self.read(second)], gate=gate)
            assert linear is not None
            for num_rows in (1, 33):
                x = activations(num_rows, inputs, self.dtype)
                halves = [x.float() @ self.case.meant(each).T for each in (first, second)]
                expected = torch.cat(halves, dim=1)
                if linear.gates:
                    expected = TorchKernels().gate(expected, gate)
                found = linear.apply(x).float()
                scale = expected.abs().amax()
                assert (found - expected).abs().max() / scale < self.case.errors[self.dtype], gate

    def check_bytes(self, outputs: int, inputs: int) -> None:
        """The format's count is what the method takes, where no strip is padded."""
        linear = self.load([self.read(weight_of(outputs, inputs))])
        assert linear is not None
        counted = self.case.kept.num_bytes(outputs, inputs, self.dtype.itemsize)
        # bf16 weights of float32 activations may stay as they are.
        assert linear.num_bytes in (counted, *([counted // 2] if self.case.kept == FLOATS else []))

    def check_grouped(self, outputs: int, inputs: int) -> None:
        """Experts as one product give what each gives alone, or are left alone."""
        loaded = [self.load([self.read(weight_of(outputs, inputs, seed))]) for seed in range(3)]
        linears = [linear for linear in loaded if linear is not None]
        together = linears[0].grouped(linears)
        if together is None:
            return
        x = activations(6, inputs, self.dtype)
        found = together.apply(x, torch.tensor([1, 1, 6], dtype=torch.int32))
        alone = torch.cat([linears[0].apply(x[:1]), linears[2].apply(x[1:])])
        torch.testing.assert_close(found, alone)
