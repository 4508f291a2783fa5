"""Every kernel, native and torch, against an fp32 reference written from the definition."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import logging
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.native_build import Target, build, cpu_features, for_target
from engine.kernels.native.native_kernels import NativeKernels, native_library, pick_kernels
from engine.kernels.native.recipe import KERNELS
from engine.kernels.paged_kv import LayerKv
from engine.kernels.protocol import Activation, AttentionShape, HeadNorms, Kernels, Rotation
from engine.kernels.step_batch import StepBatch, pack
from engine.kernels.torch.torch_kernels import TorchKernels
from engine.models.rope import RopeConfig, RotaryTable
from engine.request import RequestId, ScheduledSeq

CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32
MANY = (0, 1, 15, 16, 17, 31, 33, 47, 48, 63, 100, 127, 128, 255, 257, 1023, 1201)
# bf16 has 8 bits: an output's error is measured against the largest value it is made of.
TOLERANCE = {F32: 1e-5, BF16: 8e-3}


def native(target: Target | None = None, compiler: str | None = None) -> NativeKernels:
    """As compiled for this CPU, or as images have them for a target."""
    library = native_library()
    if library is None:
        pytest.skip("no C++ compiler on this machine")
    if compiler is not None:
        if shutil.which(compiler) is None:
            pytest.skip(f"no {compiler} on this machine")
        recipe = dataclasses.replace(KERNELS, compilers=(compiler,))
        library = ctypes.CDLL(str(build(recipe)))
    elif target is not None:
        if platform.machine() != "x86_64":
            pytest.skip("flags of x86-64's compilers")
        if lacks := target.lacking(cpu_features()):
            pytest.skip(f"this CPU lacks {lacks}")
        library = ctypes.CDLL(str(build(for_target(KERNELS, target))))
    return NativeKernels(library)


MAKERS: dict[str, Callable[[], Kernels]] = {
    "torch": TorchKernels,
    "native": native,
    **{target.name: functools.partial(native, target) for target in KERNELS.targets},
    "by clang": lambda: native(compiler="clang++"),
}


MARKS = {"by clang": pytest.mark.full}


@pytest.fixture(scope="module", params=[pytest.param(m, marks=MARKS.get(m, ())) for m in MAKERS])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    torch.set_num_threads(1)
    return MAKERS[request.param]()


@dataclass
class Case:
    """Sequences of (context, new tokens) with random KV in scattered blocks; the rest is NaN."""

    seqs: Sequence[tuple[int, int]]
    num_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = F32
    window: int | None = None
    sharpness: float = 1.0
    scale: float | None = None
    """None: that of `head_dim`."""

    def __post_init__(self) -> None:
        sizes = self.num_heads, self.kv_heads, self.head_dim
        self.shape = AttentionShape(*sizes, 1e-6, self.scale or self.head_dim**-0.5)
        generator = torch.Generator().manual_seed(0)
        rng = np.random.default_rng(0)
        size = self.block_size
        counts = [-(-(context + new) // size) for context, new in self.seqs]
        regions, total = 3, sum(counts) + 1
        per_region = -(-total // regions)
        shape = (regions, per_region, self.kv_heads, size, self.head_dim)
        self.kv = LayerKv(
            torch.full(shape, torch.nan, dtype=self.dtype),
            torch.full(shape, torch.nan, dtype=self.dtype),
        )
        free = list(rng.permutation(np.arange(1, regions * per_region)))
        scheduled = []
        self.history: list[tuple[torch.Tensor, torch.Tensor]] = []  # [tokens, kv_heads, head_dim]
        for (context, new), count in zip(self.seqs, counts):
            table = np.array([free.pop() for _ in range(count)], dtype=np.int32)
            shape_of_one = (context + new, self.kv_heads, self.head_dim)
            keys, values = (
                torch.randn(shape_of_one, generator=generator).to(self.dtype) for _ in range(2)
            )
            self.history.append((keys, values))
            at = torch.arange(context + new)
            block = torch.from_numpy(table.astype(np.int64))[at // size]
            region, block = block // per_region, block % per_region
            self.kv.keys[region, block, :, at % size] = keys
            self.kv.values[region, block, :, at % size] = values
            if self.window is not None:
                self._leave(table, max(0, context + 1 - self.window) // size, per_region)
            tokens = np.zeros(new, dtype=np.uint32)
            name = RequestId(str(len(scheduled)))
            scheduled.append(ScheduledSeq(name, tokens, context, (table,), True))
        self.batch: StepBatch = pack(scheduled, size, CPU)
        queries = torch.randn(
            self.batch.num_tokens, self.num_heads, self.head_dim, generator=generator
        )
        self.queries = (queries * self.sharpness).to(self.dtype)

    def _leave(self, table: np.ndarray, count: int, per_region: int) -> None:
        """What the window has left is the null block, whose content is NaN here."""
        for block in table[:count]:
            self.kv.keys[block // per_region, block % per_region] = torch.nan
            self.kv.values[block // per_region, block % per_region] = torch.nan
        table[:count] = 0

    def reference(self) -> torch.Tensor:
        out = torch.empty(self.queries.shape)
        row = 0
        for (context, new), (keys, values) in zip(self.seqs, self.history):
            group = self.num_heads // self.kv_heads
            keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
            for position in range(context, context + new):
                first = 0 if self.window is None else max(0, position + 1 - self.window)
                seen = slice(first, position + 1)
                scores = torch.einsum("hd,khd->hk", self.queries[row].double(), keys[seen])
                weights = (scores * self.shape.scale).softmax(-1)
                out[row] = torch.einsum("hk,khd->hd", weights, values[seen]).float()
                row += 1
        return out

    def check(self, kernels: Kernels) -> None:
        group = self.batch.groups[0]
        found = kernels.attend(
            self.queries, self.kv, self.batch, group, self.shape, self.window
        ).float()
        assert found.isfinite().all()
        expected = self.reference()
        scale = expected.abs().amax(dim=-1, keepdim=True)
        error = ((found - expected).abs() / scale).max().item()
        assert error < TOLERANCE[self.dtype], error


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "case",
    [
        {"seqs": [(0, 1)]},
        {"seqs": [(0, 7), (33, 1), (100, 45)]},
        {"seqs": [(511, 1), (512, 1), (513, 1), (0, 1)], "head_dim": 128},
        {"seqs": [(700, 200)], "num_heads": 8, "block_size": 32},
        {"seqs": [(0, 300)], "num_heads": 6, "kv_heads": 1, "head_dim": 96},
        {"seqs": [(4095, 1), (4000, 3)], "num_heads": 8, "kv_heads": 8, "head_dim": 32},
        {"seqs": [(300, 1), (0, 70), (77, 33)], "window": 40, "block_size": 8},
        {"seqs": [*((n, 1) for n in MANY), (5, 9), (0, 1)], "num_heads": 12, "kv_heads": 3},
        {"seqs": [(9, 2), *((n, 1) for n in MANY)], "window": 24, "block_size": 8},
        {"seqs": [(3000, 1), (2900, 5)], "window": 1024, "head_dim": 128},
        {"seqs": [(0, 65), (64, 1)], "window": 1},
        {"seqs": [(700, 130)], "sharpness": 12.0},
        {"seqs": [(400, 300)], "window": 150},
        {"seqs": [(60, 9)], "head_dim": 16, "num_heads": 2},
        {"seqs": [(60, 9), (70, 1)], "head_dim": 256, "scale": 0.11},
    ],
)
def test_attention_is_that_of_the_definition(
    kernels: Kernels, case: dict[str, object], dtype: torch.dtype
) -> None:
    Case(**case, dtype=dtype).check(kernels)  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(
    seqs=st.lists(
        st.tuples(st.integers(0, 200), st.sampled_from([1, 1, 1, 2, 20])), min_size=1, max_size=9
    ),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1), (8, 8)]),
    block_size=st.sampled_from([1, 8, 16]),
    window=st.sampled_from([None, 1, 2, 17, 64]),
    dtype=st.sampled_from([F32, BF16]),
)
def test_torch_attention_is_right_for_any_mix_of_decodes_and_chunks(
    seqs: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    Case(seqs, *heads, 32, block_size, dtype, window).check(TorchKernels())


def test_the_torch_kernels_keep_steps_and_groups_apart() -> None:
    kernels = TorchKernels()
    for window in (None, 20, None):
        Case([(50, 1), (90, 1)], window=window).check(kernels)


@settings(max_examples=40, deadline=None)
@given(
    seqs=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1), (8, 8), (24, 2)]),
    head_dim=st.sampled_from([32, 64, 96, 160]),
    block_size=st.sampled_from([1, 8, 16, 64]),
    window=st.sampled_from([None, 1, 2, 17, 64, 100]),
    dtype=st.sampled_from([F32, BF16]),
    threads=st.sampled_from([1, 4]),
)
def test_native_attention_is_right_for_any_shape(
    seqs: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    threads: int,
) -> None:
    kernels = native()
    torch.set_num_threads(threads)
    try:
        Case(seqs, *heads, head_dim, block_size, dtype, window).check(kernels)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("window", [None, 700])
def test_keys_of_one_long_sequence_split_over_threads_and_merge(window: int | None) -> None:
    kernels = native()
    torch.set_num_threads(4)
    try:
        for dtype in (F32, BF16):
            case = Case([(1501, 1)], 4, 1, 64, 16, dtype, window)
            case.check(kernels)
    finally:
        torch.set_num_threads(1)


# --- row-wise kernels ----------------------------------------------------------------------------


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal within the rounding of the found dtype, per output."""
    bits = {F32: 2e-6, BF16: 8e-3}[found.dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=bits, atol=bits)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(1, 64), (3, 1024), (300, 80), (5, 33)])
def test_norms_are_those_of_the_definition(
    kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(shape).to(dtype) * 3 for _ in range(2))
    weight = torch.randn(shape[1])

    def norm(v: torch.Tensor) -> torch.Tensor:
        v = v.double()
        return v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    close(kernels.rms_norm(x, weight, 1e-5), norm(x))
    total = (x.float() + residual.float()).to(dtype)
    close(kernels.add_rms_norm(x, residual, weight, 1e-5), norm(total))
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(1, 64), (300, 160), (2, 34)])
@pytest.mark.parametrize("activation", list(Activation))
def test_gates_are_those_of_the_definition(
    kernels: Kernels, activation: Activation, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 20).to(dtype)
    x[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    gate, up = x.double().chunk(2, dim=-1)
    expected = gate / (1 + (-gate).exp()) * up
    if activation is Activation.GELU_TANH:
        tanh = ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh()
        expected = 0.5 * gate * (1 + tanh) * up
    found = kernels.gate(x, activation)
    bits = {F32: 2e-6, BF16: 1.6e-2}[dtype]
    # 1 + tanh loses small numbers: an error is measured against what an open gate lets through.
    assert ((found.double() - expected).abs() <= bits * (gate * up).abs().clamp(min=1.0)).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_rotation_and_write_are_those_of_the_definition(
    kernels: Kernels, head_dim: int, with_norms: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    case = Case([(5, 30), (40, 1)], 4, 2, head_dim, 8, dtype)
    batch, kv, shape = case.batch, case.kv, case.shape
    qkv = torch.randn(batch.num_tokens, shape.qkv_width).to(dtype)
    norms = None
    if with_norms:
        norms = HeadNorms(*(torch.randn(head_dim) for _ in range(2)))
    before = kv.keys.clone()
    table = RotaryTable(RopeConfig(head_dim, 10000.0), CPU)
    rotation = Rotation(*table.at(batch.positions))
    queries = kernels.rotate_and_write(qkv, shape, norms, rotation, kv, batch.groups[0])

    heads = qkv.double().view(batch.num_tokens, 8, head_dim)

    def expected(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        pairs = torch.complex(*x.chunk(2, dim=-1))
        angles = batch.positions[:, None].double() * 10000.0 ** (
            -torch.arange(0, head_dim, 2).double() / head_dim
        )
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((turned.real, turned.imag), dim=-1)

    bits = {F32: 2e-5, BF16: 3e-2}[dtype]
    assert_close = torch.testing.assert_close
    assert_close(
        queries.double(), expected(heads[:, :4], norms and norms.query), rtol=bits, atol=bits
    )
    slots = batch.groups[0].slots
    block, offset = slots // 8, slots % 8
    region, block = block // kv.blocks_per_region, block % kv.blocks_per_region
    written = kv.keys[region, block, :, offset]
    assert_close(
        written.double(), expected(heads[:, 4:6], norms and norms.key), rtol=bits, atol=bits
    )
    assert torch.equal(kv.values[region, block, :, offset].double(), heads[:, 6:])
    kv.keys[region, block, :, offset] = before[region, block, :, offset]
    assert torch.equal(kv.keys.nan_to_num(7.0), before.nan_to_num(7.0))  # nothing else was touched


# --- without the library -------------------------------------------------------------------------


def test_without_a_compiler_torch_serves_and_one_line_says_so(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    native_library.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert isinstance(pick_kernels(CPU, BF16), TorchKernels)
        assert isinstance(pick_kernels(CPU, F32), TorchKernels)
    assert [record.getMessage() for record in caplog.records] == [
        "no native attention kernels, using torch's: "
        "no compiler (c++ or g++ or clang++) on this machine"
    ]


def test_the_kernels_are_built_without_torch() -> None:
    """`baton up` builds them in a process that stays small."""
    script = "import sys, cluster.local.bring_up; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
