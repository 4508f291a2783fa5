"""How much KV memory a GPU has room for, beside the weights and the largest step.

The weights are on the device already. A dry run of the largest prefill chunk and of the largest
decode batch shows the most memory that a step takes; every table names the one block of its pool.
KV gets what `gpu_memory_utilization` leaves beyond both, if that much is free now.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import torch

from baton.config.engine import EngineConfig
from engine.api import LocalDeviceMemory, ModelSpec
from engine.kernels.paged_kv import PagedKv
from engine.kernels.step_batch import pack
from engine.kernels.torch.decode_rows import MOST_BLOCKS
from engine.models.decoder import Decoder
from engine.request import RequestId, RequestSpec, SamplingParams, ScheduledSeq, StepPlan
from engine.run.auto_choice import device_of
from engine.run.cuda_graphs import MOST_SEQS, DecodeGraphs
from engine.run.tp import TpGroup
from engine.sampling.sampler import Sampler
from kv_transfer.layout import RegionLayout

log = logging.getLogger(__name__)

_GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")
_HARDEST = SamplingParams(top_k=50, top_p=0.9, repetition_penalty=1.1, logprobs=5)
"""The sampling settings that take the most memory per row."""
_LESS = (
    "Lower engine.max_num_batched_tokens, engine.max_num_seqs or engine.max_model_len, or use more"
    " GPUs a replica (tensor_parallel)"
)


def with_sized_kv(
    config: EngineConfig, spec: ModelSpec, decoder: Decoder, tp: TpGroup | None
) -> EngineConfig:
    """Fill in `kv_memory_bytes` for a GPU unless it is set. All ranks take the smallest rank's
    value, so that they have equally many blocks.

    Raises TpPeerError, and ValueError with how much memory is missing.
    """
    device = device_of(config)
    rank, size = (0, 1) if tp is None else (tp.rank, tp.size)
    if device.type != "cuda" or config.kv_memory_bytes is not None or config.num_blocks is not None:
        _refuse_too_much(config, spec, device, size)
        return config
    weights = torch.cuda.memory_allocated()
    try:
        step = step_peak_bytes(config, spec, decoder, device, (rank, size))
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the GPU lacks memory for its largest step beside {weights / _GIB:.2f} GiB of weights:"
            f" {error}. {_LESS}"
        ) from error
    # After the dry run: kernels and libraries that it loaded take memory of their own.
    free, total = torch.cuda.mem_get_info()
    for_kv = min(int(total * config.gpu_memory_utilization) - weights, free) - step
    if tp is not None:
        for_kv = min(tp.gather(for_kv))
    needed = config.num_regions * spec.block_bytes(size)
    if for_kv < needed:
        raise ValueError(
            f"the GPU lacks {(needed - for_kv) / _GIB:.2f} GiB for {config.num_regions} blocks of"
            f" KV: it has {total / _GIB:.2f} GiB, of which {free / _GIB:.2f} are free and"
            f" gpu_memory_utilization allows {config.gpu_memory_utilization:g}; weights take"
            f" {weights / _GIB:.2f}, the largest step {step / _GIB:.2f}. {_LESS}"
        )
    log.info(
        "KV gets %.2f GiB of the GPU's %.2f: weights %.2f, the largest step %.2f",
        *(each / _GIB for each in (for_kv, total, weights, step)),
    )
    return dataclasses.replace(config, kv_memory_bytes=for_kv)


def _refuse_too_much(
    config: EngineConfig, spec: ModelSpec, device: torch.device, tp_size: int
) -> None:
    """Raise ValueError if the KV that was asked for exceeds the memory that is free. On a CPU the
    ranks share it; pages that nobody has touched yet would be promised, and the process killed."""
    per_region = spec.region_layout(config, 0, tp_size)
    asked = config.num_regions * per_region.num_bytes()
    if device.type == "cuda":
        free, whose = torch.cuda.mem_get_info()[0], "GPU"
    else:
        asked, free, whose = asked * tp_size, _free_host_bytes(), "machine"
    if asked > free:
        field = "kv_memory_bytes" if config.num_blocks is None else "num_blocks"
        raise ValueError(
            f"engine.{field} asks for {asked / _GIB:.2f} GiB of KV; the {whose} has"
            f" {free / _GIB:.2f} GiB free"
        )


def _free_host_bytes() -> int:
    """What can be taken without swapping, as Linux estimates it, or what is left of the
    container's limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (available,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    free = int(available) << 10
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.exists() and (most := limit.read_text().strip()).isdigit():
        free = min(free, int(most) - int(used.read_text()))
    return free


def step_peak_bytes(
    config: EngineConfig,
    spec: ModelSpec,
    decoder: Decoder,
    device: torch.device,
    rank_of: tuple[int, int],
) -> int:
    """Measure the most memory that one step takes beyond weights and KV, and what recorded decodes
    keep; 0 on a CPU, which does not count it.

    `rank_of`: TP rank and size. Every rank must call it.
    """
    regions = RegionLayout(spec.layout, *rank_of, 2)
    kv = PagedKv(LocalDeviceMemory(regions, 1, str(device)), regions, device)
    longest = min(config.max_model_len or spec.max_model_len, spec.max_model_len)
    chunk = min(config.max_num_batched_tokens, longest)
    # torch's kernels gather decodes by pieces: as many of the longest as make one, then all.
    in_piece = max(1, MOST_BLOCKS // -(-longest // config.block_size))
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    _run(spec, decoder, kv, device, 1, chunk, longest - chunk)
    _run(spec, decoder, kv, device, min(in_piece, config.max_num_seqs), 1, longest - 1)
    _run(spec, decoder, kv, device, config.max_num_seqs, 1, 0)
    if not on_gpu:
        return 0
    peak = torch.cuda.max_memory_allocated() - before
    return peak + _graphs_bytes(config.max_num_seqs, spec, decoder, kv)


@torch.inference_mode()
def _graphs_bytes(num_seqs: int, spec: ModelSpec, decoder: Decoder, kv: PagedKv) -> int:
    """Measure what recorded decodes keep: the largest graph's memory, in which the others take
    place."""
    graphs = DecodeGraphs.on(decoder, kv, spec.max_model_len)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    if graphs is not None:
        seqs = _seqs(spec, min(num_seqs, MOST_SEQS), 1, 0)
        graphs.hidden(StepPlan(0, tuple(seqs)))
        torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() - before


@torch.inference_mode()
def _run(
    spec: ModelSpec,
    decoder: Decoder,
    kv: PagedKv,
    device: torch.device,
    num_seqs: int,
    num_tokens: int,
    context: int,
) -> None:
    """Run a step of `num_seqs` sequences that compute `num_tokens` each behind `context` others."""
    seqs = _seqs(spec, num_seqs, num_tokens, context)
    batch = pack(seqs, spec.layout.block_size, device)
    hidden = decoder.forward(batch, kv, lambda layer: None)
    logits = decoder.logits(hidden[batch.sample_rows])
    if logits is not None:
        specs = {
            seq.request_id: RequestSpec(seq.request_id, seq.token_ids, num_tokens, _HARDEST)
            for seq in seqs
        }
        Sampler(spec.eos_token_ids).sample(logits, seqs, specs)


def _seqs(spec: ModelSpec, num_seqs: int, num_tokens: int, context: int) -> list[ScheduledSeq]:
    table = np.ones(-(-(context + num_tokens) // spec.layout.block_size), np.int32)
    tables = tuple(table for _ in spec.layout.groups)
    tokens = np.zeros(num_tokens, np.uint32)
    return [
        ScheduledSeq(RequestId(f"dry-run-{number}"), tokens, context, tables, True)
        for number in range(num_seqs)
    ]
