"""Runs a step's plan on this process's rank, with the real model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from baton.config.engine import EngineConfig
from engine.api import ComputeMasks, KvMemory, KvSink, ModelSpec
from engine.kernels.native.native_kernels import pick_kernels
from engine.kernels.paged_kv import TORCH_DTYPES, PagedKv
from engine.kernels.step_batch import pack
from engine.models.checkpoint.folder import read_config, resolve
from engine.models.checkpoint.weights import Checkpoint
from engine.models.decoder import Decoder
from engine.models.loading import WeightLoader
from engine.models.sharding import shard_of
from engine.request import (
    RequestId,
    RequestSpec,
    SampledToken,
    ScheduledSeq,
    Scored,
    Scores,
    StepPlan,
    TokenLogprobs,
)
from engine.run import compute_threads
from engine.run.auto_choice import device_of
from engine.run.cuda_graphs import DecodeGraphs
from engine.run.layer_pushes import LayerPushes
from engine.run.tp import TpGroup
from engine.sampling.sampler import logprobs_of
from kv_transfer.layout import RegionLayout

log = logging.getLogger(__name__)

_SCORED_ROWS = 64

SampleFn = Callable[
    [torch.Tensor, Sequence[ScheduledSeq], dict[RequestId, RequestSpec], ComputeMasks | None],
    list[SampledToken],
]
"""(float32 logits [n, vocab_size], the n sequences that sample, specs by id, masks) -> n tokens."""


class TorchRunner:
    """The runner of one rank. On rank 0 of a group, `run` makes the others run the same plan."""

    def __init__(
        self,
        model: ModelSpec,
        decoder: Decoder,
        memory: KvMemory,
        sink: KvSink,
        sample: SampleFn,
        tp: TpGroup | None,
    ) -> None:
        self._model = model
        self._decoder = decoder
        rank, size = (0, 1) if tp is None else (tp.rank, tp.size)
        regions = RegionLayout(model.layout, rank, size, memory.blocks_per_region)
        self._kv = PagedKv(memory, regions, decoder.device)
        self._sink = sink
        self._sample = sample
        self._tp = tp
        self._device = decoder.device
        self._pushes = LayerPushes.on(self._device, sink, model.layout)
        self._graphs = DecodeGraphs.on(decoder, self._kv, model.max_model_len)

    @property
    def model(self) -> ModelSpec:
        return self._model

    @property
    def num_blocks(self) -> int:
        return self._kv.num_blocks

    def run(
        self,
        plan: StepPlan,
        specs: dict[RequestId, RequestSpec],
        masks: ComputeMasks | None = None,
        scores: Scores | None = None,
    ) -> list[SampledToken]:
        """Run the plan on all ranks and sample. Raises TpPeerError when a rank is lost."""
        if self._tp is not None:
            self._tp.send_plan(plan)
        logits = self.run_step(plan, scores)
        if logits is None:
            return []
        return self._sample(logits, [seq for seq in plan.seqs if seq.samples], specs, masks)

    def follow(self) -> None:
        """On ranks > 0: run rank 0's plans until it stops. Raises TpPeerError when a peer is
        lost."""
        assert self._tp is not None
        try:
            while (plan := self._tp.receive_plan()) is not None:
                self.run_step(plan)
        finally:
            self.close()

    @torch.inference_mode()
    def run_step(self, plan: StepPlan, scores: Scores | None = None) -> torch.Tensor | None:
        """Run this rank's part of a step. Returns the sampling sequences' logits, on rank 0, and
        fills `scores`."""
        self._take_over_threads()
        for message in plan.sink_messages:
            self._sink.message(message)
        logits = self._forward(plan, {} if scores is None else scores) if plan.seqs else None
        is_read_back = any(seq.samples for seq in plan.seqs) or not plan.seqs
        self._pushes.finish(is_read_back=is_read_back)
        self._sink.step_done()
        return logits

    def _take_over_threads(self) -> None:
        """Compute with the wanted number of threads. torch keeps it per thread, so it is set on
        this one."""
        wanted = compute_threads.wanted()
        if wanted is None or wanted == torch.get_num_threads() or self._device.type != "cpu":
            return
        log.info("computing with %d threads instead of %d", wanted, torch.get_num_threads())
        torch.set_num_threads(wanted)

    def _forward(self, plan: StepPlan, scores: Scores) -> torch.Tensor | None:
        if self._graphs is not None:
            hidden = self._graphs.hidden(plan)
            if hidden is not None:
                return self._decoder.logits(hidden)
        batch = pack(plan.seqs, self._kv.layout.block_size, self._device)

        hidden = self._decoder.forward(batch, self._kv, self._pushes.of_step(plan.pushes))
        for seq, start in zip(plan.seqs, batch.query_starts):
            if seq.scored is not None:
                rows = hidden[start : start + len(seq.token_ids)]
                scores[seq.request_id] = self._score(rows, seq.scored)
        if not len(batch.sample_rows):
            return None
        return self._decoder.logits(hidden[batch.sample_rows])

    def _score(self, hidden: torch.Tensor, scored: Scored) -> list[TokenLogprobs]:
        """Score a chunk's tokens by slices: the logits of a whole chunk could take gigabytes."""
        found: list[TokenLogprobs] = []
        for start in range(0, len(hidden), _SCORED_ROWS):
            logits = self._decoder.logits(hidden[start : start + _SCORED_ROWS])
            token_ids = scored.token_ids[start : start + _SCORED_ROWS]
            if logits is not None:  # as it is on ranks above 0, which compute their part of it
                found += logprobs_of(logits[: len(token_ids)], token_ids, scored.num_top)
        return found

    def close(self) -> None:
        self._pushes.close()
        if self._tp is not None:
            self._tp.close()


def load_torch_decoder(
    model_path: str, config: EngineConfig, spec: ModelSpec, tp: TpGroup | None
) -> Decoder:
    """Load this rank's part of the model, with its weights.

    Raises ModelError, TpPeerError, and ValueError if the weights do not fit the device.
    """
    rank, size = (0, 1) if tp is None else (tp.rank, tp.size)
    device = device_of(config)
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads or compute_threads.share(size))
    folder = resolve(model_path)
    model = read_config(folder, config.quantization)
    shard = shard_of(model, rank, size)
    dtype = TORCH_DTYPES[spec.layout.groups[0].tensors[0].dtype]  # computing in what KV is kept in
    log.info("weights, activations and KV are in %s on %s", dtype, device)
    with Checkpoint(folder) as checkpoint:
        try:
            weights = WeightLoader(checkpoint, model, shard, dtype, device).load()
        except torch.OutOfMemoryError as error:
            needed = checkpoint.num_elements() * dtype.itemsize / size / (1 << 30)
            there_is = torch.cuda.mem_get_info()[1] / (1 << 30)
            raise ValueError(
                f"{folder}: weights take about {needed:.1f} GiB of a GPU that has {there_is:.1f}:"
                f" {error}. Use more GPUs a replica (tensor_parallel)"
            ) from error
    decoder = Decoder(model, weights, shard, pick_kernels(device, dtype), tp)
    if tp is not None:
        tp.wait_all()  # steps have a time limit: none may start while a rank still loads
    return decoder
