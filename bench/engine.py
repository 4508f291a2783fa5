"""Speed of the engine on this CPU beside its peers, side by side in one run.

Every engine has a process of its own, and peers a virtual environment of theirs (`make
bench-peers`). They take turns in each round, on the same weights, in the same precision of weights,
activations and KV. Medians are compared. Prefill is tokens a second of one prompt, to its first
token. Decode is tokens a second of a batch that has computed its prompts. The roofline is the least
time for the cell's operations and bytes, at this machine's product and read bandwidth, measured in
the same run. `--ablations` sets Baton beside itself without one technique each, instead, and
`--int8` its 8-bit weights beside the checkpoint's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import random_model
from bench.engine_sides import CONTEXT
from bench.report import cpu_features, describe, markdown, progress, say
from engine.kernels.native import huge_pages
from engine.kernels.native.packed_weights import PackedWeight, can_pack
from engine.models.linear.table import AT_LOAD
from engine.models.roofline import Device, RankCost
from engine.run import compute_threads

CELLS = ("prefill 512", "prefill 2048", "decode 1", "decode 8", "decode 32")
PEERS = {"vllm": "vllm", "vllm compiled": "vllm", "openvino": "openvino", "transformers": None}
"""Side -> its virtual environment below build/peers; None: Baton's."""
TECHNIQUES = {
    "fused layers": "",
    "packed weights": "",
    "huge pages": "",
    "AMX": "amx_bf16",
    "AVX-512": "avx512f",
}
"""Technique -> the CPU's feature that it needs."""
_ROOT = Path(__file__).parent.parent
_GOALS = {"decode 1": 1.05}  # of the best peer; 1.2 elsewhere


class Process:
    """A side that has loaded its model."""

    def __init__(self, name: str, python: Path, folder: Path, dtype: str, threads: int) -> None:
        self.name = name
        script = "bench/engine_sides.py"
        command = [str(python), "-P", script, name, str(folder), dtype, str(threads)]
        environment = {"PYTHONPATH": str(_ROOT)} if name.startswith("baton") else {}
        self._process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(_ROOT / "build" / f"bench-{name.replace(' ', '-')}.log").open("w"),
            text=True,
        )
        start = time.perf_counter()
        self._answer()
        self.ready_s = time.perf_counter() - start

    def tell(self, **command: int) -> tuple[float, int]:
        """Send a command, and return seconds and tokens."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{json.dumps(command)}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        seconds, tokens = self._answer()
        return seconds, tokens

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> RuntimeError:
        return RuntimeError(
            f"{self.name} has ended: see build/bench-*.log. If that says nothing, the engines need "
            "more memory than there is: name fewer --peers"
        )


def best_device(dtype: torch.dtype) -> Device:
    """Measure what this machine can do at best."""
    weight = torch.randn(4096, 1024).to(dtype)
    x = torch.randn(2048, 1024).to(dtype)
    seconds = [_best(lambda: torch.nn.functional.linear(x, weight))]
    if can_pack([weight], dtype, is_gated=False):
        packed = PackedWeight([weight], None, dtype, None)
        seconds.append(_best(lambda: packed.apply(x)))
    memory = huge_pages.take(1 << 30).view(torch.int32)
    memory.fill_(1)
    read_s = _best(lambda: memory.sum(dtype=torch.int32))
    flops = 2 * x.numel() * len(weight)
    return Device(memory.nbytes, memory.nbytes / read_s, flops / min(seconds))


def best_tokens_per_s(device: Device, cost: RankCost, cell: str) -> float:
    kind, _, size = cell.partition(" ")
    count = int(size)
    work = cost.prefill(count) if kind == "prefill" else cost.decode(count, CONTEXT)
    return count / device.seconds(work)


def _best(run: Callable[[], object]) -> float:
    samples = []
    for _ in range(7):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return min(samples)


def prefill(sides: list[Process], length: int, rounds: int) -> list[float]:
    samples: list[list[float]] = [[] for _ in sides]
    for seed in range(rounds + 1):
        for side, found in zip(sides, samples):
            seconds, _ = side.tell(prefill=length, seed=seed)
            if seed:  # the first warms up
                found.append(length / seconds)
    return [statistics.median(found) for found in samples]


def decode(sides: list[Process], batch: int, rounds: int, steps: int) -> list[float]:
    samples: list[list[float]] = [[] for _ in sides]
    for side in sides:
        side.tell(decode=batch)
        side.tell(steps=2)
    for _ in range(rounds):
        for side, found in zip(sides, samples):
            seconds, tokens = side.tell(steps=steps)
            found.append(tokens / seconds)
    for side in sides:
        side.tell()
    return [statistics.median(found) for found in samples]


def measure(model: str, sides: list[Process], dtype: str, options: argparse.Namespace) -> str:
    """Measure all cells of one model, and return them as a table."""
    device, cost = best_device(getattr(torch, dtype)), random_model.SHAPES[model].cost(dtype)
    if options.int8:
        cost = replace(cost, config=replace(cost.config, weights=AT_LOAD["int8"]))
    peers = [side.name for side in sides[1:]]
    rows = []
    for cell in options.cells:
        progress(f"{model} {dtype}: {cell}")
        kind, size = cell.split()
        found = (
            prefill(sides, int(size), options.rounds)
            if kind == "prefill"
            else decode(sides, int(size), options.rounds, options.steps)
        )
        best = best_tokens_per_s(device, cost, cell)
        row = [f"{model} {cell}", *(f"{value:.0f}" for value in found)]
        if len(found) > 1:
            row.append(f"{found[0] / max(found[1:]):.2f} (goal {_GOALS.get(cell, 1.2)})")
        rows.append([*row, f"{best:.0f}", f"{found[0] / best:.0%}"])
        say(f"  {' | '.join(rows[-1])}")
    header = [f"{dtype}, tokens/s", sides[0].name, *peers, *(["against the best"] if peers else [])]
    ready = ", ".join(f"{side.name} {side.ready_s:.1f} s" for side in sides)
    return (
        f"{markdown([*header, 'roofline', 'of it'], rows)}\n\nReady after: {ready}. Roofline: "
        f"{device.flops_per_s / 1e12:.2f} TFLOP/s of products, {device.bytes_per_s / 1e9:.1f} GB/s."
    )


def sides_of(model: str, dtype: str, options: argparse.Namespace) -> list[Process]:
    folder, threads = random_model.saved(model), compute_threads.share(1)
    names: dict[str, Path] = {"baton": Path(sys.executable)}
    if options.int8:
        names = {"baton int8": Path(sys.executable), **names}
    elif options.ablations:
        techniques = [name for name, needs in TECHNIQUES.items() if needs in ("", *cpu_features())]
        if dtype == "float32":
            techniques.append("bf16 weights")
        names |= {f"baton without {each}": Path(sys.executable) for each in techniques}
    else:
        for name, environment in PEERS.items():
            python = Path(sys.executable)
            if environment is not None:
                python = _ROOT / "build" / "peers" / environment / "bin" / "python"
            if name in options.peers and python.exists():
                names[name] = python
    sides = []
    for name, python in names.items():
        progress(f"starting {name}")
        sides.append(Process(name, python, folder, dtype, threads))
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(random_model.ON_DISK))
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS, help="in quotes")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--peers", nargs="*", default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--ablations", action="store_true")
    parser.add_argument("--int8", action="store_true")
    options = parser.parse_args()
    dtype = options.dtype or random_model.usual_dtype()
    (_ROOT / "build").mkdir(exist_ok=True)
    torch.set_num_threads(compute_threads.share(1))
    print(f"{describe(' '.join(['python -m bench.engine', *sys.argv[1:]]))}\n", flush=True)
    print(f"Weights, activations and KV in {dtype} on every side. Random Qwen3 checkpoints.\n")
    for model in options.models:
        sides = sides_of(model, dtype, options)
        try:
            print(f"{measure(model, sides, dtype, options)}\n", flush=True)
        finally:
            for side in sides:
                side.stop()


if __name__ == "__main__":
    main()
