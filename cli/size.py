"""`baton size`: what a model needs of GPUs and links, by arithmetic alone.

Every figure is a bound at the GPU's peaks (`engine.models.roofline`). Where a formula says "or",
the longer time counts. Pools get the workers that the planner would give them. Memory is divided as
`engine.run.kv_sizing` does, without the largest step's, which only a dry run on the GPU shows.
"""

from __future__ import annotations

import argparse
import bisect
import json
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import NamedTuple

from baton import render
from baton.config.engine import EngineConfig
from baton.config.planner import PlannerConfig
from baton.errors import ConfigError
from baton.model_files import read_json
from cluster.planner.needs import PrefillLoad
from engine.errors import ModelError
from engine.models.families.table import model_config
from engine.models.linear.table import quantised
from engine.models.roofline import GPUS, Device, RankCost

_BLOCK, _SHARE = EngineConfig.block_size, EngineConfig.gpu_memory_utilization
_BATCHES = range(1, 1 << 20)


class Figure(NamedTuple):
    """`value`: None where there is none, as of a target out of reach."""

    name: str
    unit: str
    value: float | str | None
    formula: str

    def shown(self) -> str:
        if self.value is None or isinstance(self.value, str):
            return self.value or "-"
        if self.unit == "s":
            return render.milliseconds(self.value * 1e3)
        if self.unit == "bytes":
            return render.num_bytes(self.value)
        return f"{self.value:,.{0 if self.value >= 10 else 2}f} {self.unit}".strip()


def size(arguments: argparse.Namespace) -> int:
    """Raises ConfigError naming the argument that is wrong."""
    try:
        figures = list(_figures(arguments, _cost(arguments), _gpu(arguments)))
    except ModelError as error:
        raise ConfigError(f"MODEL or --tp: {error}") from error
    if arguments.output == "json":
        keys = [f"{each.name} {each.unit}".strip().lower().replace(" ", "_") for each in figures]
        print(json.dumps(dict(zip(keys, (each.value for each in figures))), indent=2))
        return 0
    columns = ["figure", ">value", *(["formula"] if arguments.explain else [])]
    rows = [[each.name, each.shown(), each.formula][: len(columns)] for each in figures]
    render.out().print(render.table(arguments.model, columns, rows))
    return 0


def _cost(arguments: argparse.Namespace) -> RankCost:
    path = Path(arguments.model)
    raw = read_json(path / "config.json" if path.is_dir() else path)
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    if dtype not in ("bfloat16", "float16"):
        raise ConfigError(f"MODEL {path}: dtype {dtype}: write bfloat16 into a copy of the file")
    config = model_config(raw, str(path))
    config = replace(config, weights=quantised(config.weights, arguments.quantization))
    return RankCost(config, dtype, arguments.tp)


def _gpu(arguments: argparse.Namespace) -> Device:
    named = GPUS.get((arguments.gpu or "").upper())
    own = arguments.memory_gb, arguments.bandwidth_gbs, arguments.tflops
    if named is None and (arguments.gpu is not None or None in own):
        known = f"known are {', '.join(GPUS)}; else give --memory-gb, --bandwidth-gbs and --tflops"
        raise ConfigError(f"--gpu {arguments.gpu or 'is missing'}: {known}")
    peaks = zip(own, (1e9, 1e9, 1e12), astuple(named) if named else (0.0, 0.0, 0.0))
    return Device(*(mine * unit if mine else published for mine, unit, published in peaks))


def _figures(arguments: argparse.Namespace, cost: RankCost, gpu: Device) -> Iterator[Figure]:
    answer, longest = arguments.answer, cost.config.longest_context
    context = max(arguments.context or 0, (arguments.prompt or 0) + (answer or 0))
    prompt = arguments.prompt or context - (answer or 0)
    if not 0 < prompt <= context <= longest:
        raise ConfigError(f"--context, or --prompt and --answer: 1 to {longest}, not {context}")
    planner = PlannerConfig(**dict(zip(("ttft_target_s", "itl_target_s"), arguments.slo)))
    free = _SHARE * gpu.memory_bytes - cost.weight_bytes
    usable = f"{_SHARE:g} * {gpu.memory_bytes / 1e9:g} GB"
    if free <= 0:
        weights = render.num_bytes(cost.weight_bytes)
        raise ConfigError(f"--tp {cost.tp_size}: too few for weights: {weights} a GPU, of {usable}")

    def step_s(batch: int) -> float:
        return gpu.seconds(cost.decode(batch, context))

    held = -(-cost.held_tokens(context) // _BLOCK) * _BLOCK
    by_memory = int(free // (held * cost.kv_token_bytes))
    by_itl = bisect.bisect_right(_BATCHES, planner.itl_target_s, key=step_s)
    batch = min(by_memory, by_itl)
    itl_s = step_s(batch) if batch else None
    yield from _memory(cost, held)
    yield Figure("free for KV a GPU", "bytes", free, f"{usable} - weights a GPU")
    yield Figure("one stream", "tokens a s", 1 / step_s(1), "1 / its ITL")
    yield Figure("streams by memory", "", by_memory, f"free / ({held:,} * KV a token and GPU)")
    yield Figure("streams by ITL", "", by_itl, f"ITL at most {planner.itl_target_s:g} s")
    yield Figure("bound by", "", "memory" if by_memory <= by_itl else "ITL", "the fewer streams")
    yield Figure("ITL", "s", itl_s, "(weights + KV) / bandwidth, or products / FLOP/s")
    yield Figure("decode worker", "tokens a s", batch / itl_s if itl_s else None, "streams / ITL")
    if answer:
        gpus = cost.tp_size * arguments.rate * answer / planner.max_kv_use
        formula = f"--tp * --rate * {answer:,} * ITL / streams / {planner.max_kv_use:g}"
        yield Figure("decode GPUs", "", gpus * itl_s / batch if itl_s else None, formula)
    yield from _prefill(cost, gpu, planner, prompt, arguments.rate)


def _memory(cost: RankCost, held: int) -> Iterator[Figure]:
    config, whole = cost.config, RankCost(cost.config, cost.dtype)
    heads = f"2 * {config.num_layers} layers * {config.head_dim} * 2 bytes * KV heads"
    each, token = whole.weight_bytes / whole.num_parameters, whole.kv_token_bytes
    count = f"{whole.num_parameters:,.0f} parameters * {each:.3g} bytes"
    yield Figure("weights", "bytes", whole.weight_bytes, count)
    yield Figure("weights a GPU", "bytes", cost.weight_bytes, f"largest of {cost.tp_size} parts")
    yield Figure("KV a token", "bytes", token, f"{heads}: {config.num_kv_heads}")
    yield Figure("KV a token and GPU", "bytes", cost.kv_token_bytes, f"{heads} of a GPU")
    yield Figure("KV a stream", "bytes", held * token, f"{held:,} * KV a token")


def _prefill(
    cost: RankCost, gpu: Device, planner: PlannerConfig, prompt: int, rate: float
) -> Iterator[Figure]:
    """Over a link slower than the last figure a prompt's KV takes longer than its prefill."""
    took_s, ttft_s = gpu.seconds(cost.prefill(prompt)), planner.ttft_target_s
    link = cost.held_tokens(prompt) * cost.kv_token_bytes / took_s / 1e9
    load = PrefillLoad(rate, rate * prompt, 0.0, 0.0, prompt / took_s, planner)
    mean = f"--tp * workers whose wait keeps TTFT, up to {planner.max_utilisation:g} busy"
    ridge = gpu.flops_per_s / gpu.bytes_per_s
    yield Figure("bound by compute from", "FLOP a byte", ridge, "FLOP/s / bandwidth")
    yield Figure("prefill", "s", took_s, "(2 * parameters * tokens + attention) / FLOP/s")
    yield Figure("prefill worker", "tokens a s", prompt / took_s, f"{prompt:,} / prefill")
    yield Figure("prompts by TTFT", "", int(ttft_s // took_s), f"{ttft_s:g} s / prefill")
    yield Figure("prefill GPUs", "", cost.tp_size * load.workers(1.0), mean)
    yield Figure("disaggregation pays from", "GB a s and GPU", link, "KV a GPU / prefill")
