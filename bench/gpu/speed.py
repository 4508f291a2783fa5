"""How near the engine comes to what the device can do.

1. Ceilings: a large copy on the device (bytes read and written), an 8192-cubed bf16 product.
2. Kernels at the shapes of Qwen3-8B: decode attention in GB/s of KV read, prefill attention in
   FLOP/s of the causal half, products in FLOP/s and in GB/s of weights.
3. Steps of random Qwen3-shaped models, through the whole engine: a prompt of n tokens until its
   first token, in one chunk; a batch of decodes whose context lies in the KV pool already, as a
   decode worker has it (`reserve`, `admit`).
4. What a decode step costs the host: kernels a layer, blocking reads a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch._C._autograd import DeviceType

from baton.config.engine import Dtype, EngineConfig
from bench.random_model import SHAPES, Shape, random_model
from bench.report import Report
from engine.api import LocalDeviceMemory
from engine.kernels.native.native_kernels import pick_kernels
from engine.kernels.paged_kv import PagedKv
from engine.kernels.protocol import AttentionShape, Kernels
from engine.kernels.step_batch import StepBatch, pack
from engine.kernels.torch.torch_kernels import TorchKernels
from engine.models.families.table import model_config
from engine.models.linear.floats import FLOATS
from engine.models.linear.method import Target, load_linear
from engine.request import RequestId, RequestSpec, SampledToken, SamplingParams, ScheduledSeq
from engine.run.build import lone_engine
from engine.run.core import EngineCore
from engine.run.torch_engine import TorchModel
from kv_transfer.layout import RegionLayout

_GIB = 1 << 30
_DTYPE: Dtype = "bfloat16"
_TORCH_DTYPE = torch.bfloat16
_BLOCK_SIZE = 16
_ROUNDS = 5
_STEPS = 8
_LEAST_RUNS = 10
_LONG_RUN_S = 0.3
_HEAD_START_CYCLES = 20_000_000
"""About 10 ms: the host asks for all runs of a round while the device still waits."""
_CACHE_BYTES = 256 << 20
"""More bytes than any device's cache holds. Works that are timed in turn should touch this much
together."""

Work = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    copy_bytes: int
    product: int
    kernel_shape: Shape
    decodes: tuple[tuple[int, int], ...]
    """Batch and context of decode attention."""
    prefills: tuple[int, ...]
    """Prompt lengths, of attention and of whole models."""
    product_rows: tuple[int, ...]
    models: tuple[str, ...]
    batches: tuple[int, ...]
    context: int


WHOLE = Sizes(
    copy_bytes=4 << 30,
    product=8192,
    kernel_shape=SHAPES["8B"],
    decodes=((1, 8192), (8, 4096), (64, 2048), (256, 1024)),
    prefills=(512, 2048, 8192),
    product_rows=(1, 64, 256, 2048, 8192),
    models=("0.6B", "8B"),
    batches=(1, 8, 64, 256),
    context=1024,
)
SMALL = Sizes(
    copy_bytes=1 << 20,
    product=64,
    kernel_shape=SHAPES["tiny"],
    decodes=((1, 64), (3, 40)),
    prefills=(32, 70),
    product_rows=(1, 16),
    models=("tiny",),
    batches=(1, 3),
    context=40,
)


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def tera(a_second: float) -> str:
    return f"{a_second / 1e12:.3g}"


def run(device: torch.device, report: Report) -> None:
    if device.type == "cpu":
        torch.set_num_threads(1)  # the test machine's other cores are busy
    sizes = WHOLE if device.type == "cuda" else SMALL
    copy_gb_s, product_flops = ceilings(device, sizes)
    report.add(
        "Ceilings",
        ("what", "measured"),
        [
            (f"copy of {sizes.copy_bytes / _GIB:.3g} GiB, GB/s", f"{copy_gb_s:.0f}"),
            (f"bf16 product of {sizes.product} cubed, TFLOP/s", tera(product_flops)),
        ],
    )
    _kernels(device, sizes, report, copy_gb_s, product_flops)
    for name in sizes.models:
        torch.cuda.empty_cache()
        try:
            measure_model(name, device, sizes, report)
        except torch.OutOfMemoryError as error:
            report.leave_out(f"{name} does not fit: {error}")


def ceilings(device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """Measure GB/s of a copy and FLOP/s of a product."""
    source = torch.randint(0, 255, (sizes.copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = device_s([partial(target.copy_, source)], device)
    del source, target
    n = sizes.product
    left, right = (torch.randn(n, n, device=device, dtype=_TORCH_DTYPE) for _ in range(2))
    product_s = device_s([partial(torch.matmul, left, right)], device)
    return 2 * sizes.copy_bytes / copy_s / 1e9, 2 * n**3 / product_s


# --- timing ---------------------------------------------------------------------------------------


def wait_for(device: torch.device) -> None:
    """Return once the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_s(works: Sequence[Work], device: torch.device) -> float:
    """Return the median seconds of one work, all of them in turn, by the device's own clock;
    on a CPU by ours. The works do the same over different memory, so that no cache helps."""
    first_s = [host_s(work, device) for work in (*works, works[0])][-1]
    if first_s > _LONG_RUN_S:
        return host_s(works[0], device)
    return statistics.median(_round_s(works, device) for _ in range(_ROUNDS))


def host_s(work: Work, device: torch.device) -> float:
    """Measure the seconds until the device has done a work, by the host's clock."""
    wait_for(device)
    start = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - start


def _round_s(works: Sequence[Work], device: torch.device) -> float:
    num_runs = max(_LEAST_RUNS, len(works))
    if device.type != "cuda":
        return host_s(lambda: _run(works, num_runs), device) / num_runs
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    _run(works, num_runs)
    end.record()
    end.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return elapsed_ms / 1e3 / num_runs


def _run(works: Sequence[Work], num_runs: int) -> None:
    for number in range(num_runs):
        works[number % len(works)]()


# --- kernels --------------------------------------------------------------------------------------


def _kernels(
    device: torch.device, sizes: Sizes, report: Report, copy_gb_s: float, product_flops: float
) -> None:
    shape = sizes.kernel_shape
    for kernels in _kernel_sets(device):
        title = f"Decode attention of one layer, {kernels.name} kernels"
        with report.table(title, ("sequences", "us", "GB/s of KV", "of the copy")) as rows:
            for batch, context in sizes.decodes:
                num_bytes, seconds = _attention(kernels, device, shape, [(context, 1)] * batch)
                gb_s = num_bytes / seconds / 1e9
                name = f"b{batch}, context {context}"
                rows.append((name, us(seconds), f"{gb_s:.4g}", f"{gb_s / copy_gb_s:.2f}"))

        title = f"Prefill attention of one layer, {kernels.name} kernels"
        with report.table(title, ("prompt", "us", "TFLOP/s", "of the product")) as rows:
            for length in sizes.prefills:
                _, seconds = _attention(kernels, device, shape, [(0, length)])
                flops = 2 * length**2 * shape.num_attention_heads * shape.head_dim / seconds
                name = f"{length} tokens"
                rows.append((name, us(seconds), tera(flops), f"{flops / product_flops:.2f}"))

    header = ("product", "us", "TFLOP/s", "of the product", "GB/s of weights", "of the copy")
    with report.table("Products of one layer", header) as rows:
        for name, width_in, width_out in _products(shape):
            for num_rows in sizes.product_rows:
                seconds = _product_s(device, num_rows, width_in, width_out)
                flops = 2 * num_rows * width_in * width_out / seconds
                gb_s = width_in * width_out * _TORCH_DTYPE.itemsize / seconds / 1e9
                rows.append(
                    (
                        f"{name} [{width_in} -> {width_out}], {num_rows} rows",
                        *(us(seconds), tera(flops), f"{flops / product_flops:.2f}"),
                        *(f"{gb_s:.4g}", f"{gb_s / copy_gb_s:.2f}"),
                    )
                )


def _kernel_sets(device: torch.device) -> list[Kernels]:
    """Return the kernels that serve, and beside a GPU's own torch's."""
    serving = pick_kernels(device, _TORCH_DTYPE)
    return [serving, TorchKernels()] if serving.name == "triton" else [serving]


def _num_copies(device: torch.device, num_bytes: int) -> int:
    """Count the buffers of this size that no cache holds; on a CPU one, which is quick."""
    return 1 if device.type == "cpu" else -(-_CACHE_BYTES // num_bytes)


def _product_s(device: torch.device, num_rows: int, width_in: int, width_out: int) -> float:
    copies = _num_copies(device, width_in * width_out * _TORCH_DTYPE.itemsize)
    shape, x = (width_out, width_in), torch.randn(num_rows, width_in, device=device)
    target, x = Target(_TORCH_DTYPE, device), x.to(_TORCH_DTYPE)
    weights = [torch.randn(shape, device=device, dtype=_TORCH_DTYPE) for _ in range(copies)]
    linears = [load_linear(FLOATS, [weight], None, target) for weight in weights]
    return device_s([partial(linear.apply, x) for linear in linears], device)


def _products(shape: Shape) -> Iterator[tuple[str, int, int]]:
    heads = shape.num_attention_heads * shape.head_dim
    qkv = heads + 2 * shape.num_key_value_heads * shape.head_dim
    yield "qkv", shape.hidden_size, qkv
    yield "attention out", heads, shape.hidden_size
    yield "gate and up", shape.hidden_size, 2 * shape.intermediate_size
    yield "down", shape.intermediate_size, shape.hidden_size


def _attention(
    kernels: Kernels, device: torch.device, shape: Shape, sequences: list[tuple[int, int]]
) -> tuple[int, float]:
    """Measure attention over sequences (context, new tokens): bytes of KV that they look at, and
    seconds."""
    lengths = [context + new for context, new in sequences]
    one_layer = replace(shape, num_hidden_layers=1)
    num_bytes = sum(lengths) * one_layer.cost(_DTYPE).kv_token_bytes
    layers = replace(shape, num_hidden_layers=_num_copies(device, num_bytes))
    layout = model_config(layers.hf_config()).kv_layout(_BLOCK_SIZE, _DTYPE)
    counts = [-(-length // _BLOCK_SIZE) for length in lengths]
    regions = RegionLayout(layout, 0, 1, 1 + sum(counts))
    kv = PagedKv(LocalDeviceMemory(regions, 1, str(device)), regions, device)
    for layer in kv.layers:
        layer.keys.normal_()
        layer.values.normal_()
    batch = _batch(device, sequences, counts)
    width = (sum(new for _, new in sequences), shape.num_attention_heads, shape.head_dim)
    queries = torch.randn(width, device=device, dtype=_TORCH_DTYPE)
    heads, head_dim = (shape.num_attention_heads, shape.num_key_value_heads), shape.head_dim
    attention = AttentionShape(*heads, head_dim, eps=1e-6, scale=head_dim**-0.5)
    works = [
        partial(kernels.attend, queries, layer, batch, batch.groups[0], attention, None)
        for layer in kv.layers
    ]
    return num_bytes, device_s(works, device)


def _batch(device: torch.device, sequences: list[tuple[int, int]], counts: list[int]) -> StepBatch:
    """Make a batch whose blocks lie scattered over the pool."""
    blocks = 1 + np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    tables = np.split(blocks, np.cumsum(counts)[:-1])
    return pack(
        [
            ScheduledSeq(RequestId(str(number)), np.zeros(new, np.uint32), context, (table,), True)
            for number, ((context, new), table) in enumerate(zip(sequences, tables))
        ],
        _BLOCK_SIZE,
        device,
    )


# --- models ---------------------------------------------------------------------------------------


def measure_model(name: str, device: torch.device, sizes: Sizes, report: Report) -> None:
    """Measure prefill and decode of one model. Raises torch.OutOfMemoryError."""
    longest = max(*sizes.prefills, sizes.context + 256) + _BLOCK_SIZE
    shape = replace(SHAPES[name], max_position_embeddings=longest)
    num_tokens = max(max(sizes.batches) * (sizes.context + 256), 2 * longest)
    config = EngineConfig(
        dtype=_DTYPE,
        device="cuda" if device.type == "cuda" else "cpu",
        block_size=_BLOCK_SIZE,
        num_blocks=num_tokens // _BLOCK_SIZE + 8,
        num_regions=1,
        max_num_seqs=max(sizes.batches),
        max_num_batched_tokens=max(sizes.prefills),
        prefix_cache=False,
    )
    spec, decoder = random_model(shape.hf_config(), _DTYPE, device)
    engine = lone_engine(TorchModel.sized(spec, config, decoder))
    assert isinstance(engine, EngineCore)
    header = ("prompt", "ms to the first token", "tokens/s", "TFLOP/s of products")
    with report.table(f"{name}: prefill", header) as rows:
        for length in sizes.prefills:
            samples = [_prefill_s(engine, device, length, seed) for seed in range(_ROUNDS + 1)][1:]
            seconds = statistics.median(samples)
            flops = shape.cost(_DTYPE).product_flops(length, 1) / seconds
            rows.append((f"{length} tokens", ms(seconds), f"{length / seconds:.0f}", tera(flops)))
    columns = (
        *("batch", "ms a step", "tokens/s", "GB/s of weights and KV"),
        *("device ms", "host-only ms", "kernels a layer", "blocking reads a step"),
    )
    with report.table(f"{name}: decode at context {sizes.context}", columns) as rows:
        for batch in sizes.batches:
            rows.append(_decode_row(engine, device, shape, batch, sizes.context))


def _prefill_s(engine: EngineCore, device: torch.device, length: int, seed: int) -> float:
    prompt = np.random.default_rng(seed).integers(0, engine.model.vocab_size, length)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.add(RequestSpec(RequestId("prefill"), prompt.astype(np.uint32), length, sampling))

    def drain() -> None:
        while engine.has_work():
            engine.step()

    return host_s(drain, device)


def _decode_row(
    engine: EngineCore, device: torch.device, shape: Shape, batch: int, context: int
) -> tuple[str, ...]:
    requests = [RequestId(f"decode-{number}") for number in range(batch)]
    sampling = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)
    prompt = np.zeros(context, np.uint32)
    for request in requests:
        engine.reserve(RequestSpec(request, prompt, context, sampling))
        engine.step()  # its answer
        engine.admit(request, SampledToken(0))

    def steps() -> None:
        for _ in range(_STEPS):
            engine.step()

    steps()
    step_s = statistics.median(host_s(steps, device) for _ in range(_ROUNDS)) / _STEPS
    work = _profile(engine, device, shape.num_hidden_layers)
    for request in requests:
        engine.abort(request)
    while engine.has_work():
        engine.step()
    num_bytes, _ = shape.cost(_DTYPE).decode(batch, context)
    rates = (f"{batch / step_s:.0f}", f"{num_bytes / step_s / 1e9:.4g}")
    row = (f"b{batch}", ms(step_s), *rates)
    if work is None:
        return (*row, "-", "-", "-", "-")
    host_only_ms = max(0.0, step_s * 1e3 - work.device_ms)
    return (
        *(*row, f"{work.device_ms:.3g}", f"{host_only_ms:.3g}"),
        *(f"{work.kernels_per_layer:.1f}", f"{work.num_blocking_reads:.1f}"),
    )


@dataclass(frozen=True)
class DeviceWork:
    """What one decode step asks of the device, from a profile. The profile slows the host, so its
    times are left out."""

    device_ms: float
    kernels_per_layer: float
    num_blocking_reads: float


_BLOCKING = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


def _profile(engine: EngineCore, device: torch.device, num_layers: int) -> DeviceWork | None:
    """Profile a step; None on a CPU, where the host computes."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    wait_for(device)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_STEPS):
            engine.step()
    if device.type != "cuda":
        return None
    events = profile.events() or []
    on_device = [
        event
        for event in events
        if event.device_type == DeviceType.CUDA
        and not event.name.startswith(("ProfilerStep", "Memcpy", "Memset"))
    ]
    blocking = sum(1 for event in events if event.name in _BLOCKING)
    return DeviceWork(
        sum(event.time_range.elapsed_us() for event in on_device) / _STEPS / 1e3,
        len(on_device) / _STEPS / num_layers,
        blocking / _STEPS,  # the profile's own synchronization at its end included
    )
