"""A model without weights, whose tokens depend on every byte of KV that they should depend on.

Each (layer, tensor, head) is a chain that digests the tokens so far: d[p] = MULTIPLIER * d[p - 1] +
mix(token[p], p) (mod 2^64), where d[-1] is the chain's key. d[p] is written into KV memory at
position p. The next token reads d[p - 1] back from there. A sampled token is a hash over all that
the request's block table leads to (a windowed group: over its window), with the position mixed into
each value. So a lost, swapped or stale block, or one of another head, changes the tokens, whatever
the chunks, batches and workers.

Needs numpy alone. Steps take the time that `FakeEngineConfig` sets, through an injectable sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from baton.config.engine import EngineConfig
from engine.api import ComputeMasks, KvMemory, KvSink, Masks, ModelSpec
from engine.request import (
    RequestId,
    RequestSpec,
    SampledToken,
    SamplingParams,
    ScheduledSeq,
    Scores,
    StepPlan,
    TokenLogprobs,
)
from engine.sampling.mixing import U64, mix, mix_all
from kv_transfer.layout import (
    KvLayout,
    LayerGroup,
    RegionLayout,
    TensorSpec,
    kv_fingerprint,
    model_fingerprint,
)

Slots = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]

_MULTIPLIER = 0xD1342543DE82EF95  # odd, so that it has an inverse modulo 2^64
_NUM_HEADS = 2
_TENSORS = tuple(TensorSpec(name, _NUM_HEADS, 1, "int64") for name in ("k", "v"))


def fake_model_spec(config: EngineConfig) -> ModelSpec:
    """Describe a model of two layers that see everything and, with `config.fake.window`, one that
    sees a window."""
    fake = config.fake
    groups = [LayerGroup(0, 2, _TENSORS)]
    if fake.window is not None:
        if fake.window < 2:
            raise ValueError("the fake engine reads a token back: its window is at least 2")
        groups.append(LayerGroup(2, 1, _TENSORS, fake.window))
    layout = KvLayout(config.block_size, tuple(groups))
    return ModelSpec(
        name="fake",
        layout=layout,
        kv_fingerprint=kv_fingerprint(layout, "fake", vocab_size=fake.vocab_size),
        model_fingerprint=model_fingerprint("fake", vocab_size=fake.vocab_size, window=fake.window),
        vocab_size=fake.vocab_size,
        max_model_len=fake.max_model_len,
        eos_token_ids=frozenset({1}),
    )


class FakeRunner:
    """The `Runner` of the fake engine, which has one rank."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelSpec,
        memory: KvMemory,
        sink: KvSink,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._model = model
        self._sink = sink
        self._timing = config.fake
        self._sleep = sleep
        self._num_blocks = memory.num_regions * memory.blocks_per_region
        region = RegionLayout(model.layout, 0, 1, memory.blocks_per_region)
        powers = np.full(model.max_model_len + 1, _MULTIPLIER, np.uint64)
        inverse = np.full(model.max_model_len + 1, pow(_MULTIPLIER, -1, 1 << 64), np.uint64)
        powers[0] = inverse[0] = 1
        self._powers: U64 = np.multiply.accumulate(powers)
        self._inverse_powers: U64 = np.multiply.accumulate(inverse)
        max_tokens = model.max_model_len + model.layout.block_size  # to the end of the last block
        self._groups = [
            _GroupKv(index, max_tokens, memory, region) for index in range(len(model.layout.groups))
        ]

    @property
    def model(self) -> ModelSpec:
        return self._model

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def close(self) -> None:
        pass

    def run(
        self,
        plan: StepPlan,
        specs: dict[RequestId, RequestSpec],
        masks: ComputeMasks | None = None,
        scores: Scores | None = None,
    ) -> list[SampledToken]:
        """Run a plan. There are no logits: nothing is scored, nor are biases added or allowed
        tokens looked at."""
        for payload in plan.sink_messages:
            self._sink.message(payload)
        if plan.seqs:
            self._write(plan)
        self._sink.step_done()
        sampled = self._sample([seq for seq in plan.seqs if seq.samples], specs)
        return sampled if masks is None else _masked(sampled, masks())

    def _write(self, plan: StepPlan) -> None:
        batch = _pack(plan.seqs)
        segment_sums = self._segment_sums(batch)
        layer_s = self._step_s(plan) / self._model.layout.num_layers()
        for g, group in enumerate(self._groups):
            before = group.read_before(plan.seqs, batch)
            steps = self._powers[batch.offsets + 1]
            values = before[batch.seqs] * steps[:, None] + segment_sums[:, None]
            slots = group.slots(plan.seqs, batch)
            pushes = [push for push in plan.pushes if push.group == g]
            for layer in range(group.spec.num_layers):
                group.write(layer, slots, values)
                if layer_s:
                    self._sleep(layer_s)
                if plan.pushes:
                    self._sink.layer_done(group.spec.first_layer + layer, pushes)

    def _segment_sums(self, batch: _Batch) -> U64:
        """For offset j in its sequence: sum over i <= j of MULTIPLIER^(j - i) * mix(token i)."""
        mixed = mix_all(batch.token_ids ^ mix_all(batch.positions))
        sums = np.cumsum(self._inverse_powers[batch.offsets] * mixed, dtype=np.uint64)
        before = np.concatenate([np.zeros(1, np.uint64), sums])[batch.starts]
        return np.asarray(self._powers[batch.offsets] * (sums - before[batch.seqs]))

    def _step_s(self, plan: StepPlan) -> float:
        num_decodes = sum(len(seq.token_ids) == 1 and seq.start > 0 for seq in plan.seqs)
        prefill_s = self._timing.prefill_token_s * (plan.num_tokens - num_decodes)
        return prefill_s + (self._timing.decode_step_s if num_decodes else 0.0)

    def _sample(
        self, seqs: list[ScheduledSeq], specs: dict[RequestId, RequestSpec]
    ) -> list[SampledToken]:
        if not seqs:
            return []
        digests = np.zeros(len(seqs), np.uint64)
        for group in self._groups:
            digests += group.digest(seqs)
        return [
            self._token(int(digest), specs[seq.request_id], seq.start + len(seq.token_ids))
            for digest, seq in zip(digests, seqs)
        ]

    def _token(self, digest: int, spec: RequestSpec, num_tokens: int) -> SampledToken:
        sampling = spec.sampling
        index = num_tokens - spec.num_prompt_tokens
        state = mix(digest)
        if sampling.temperature > 0:
            state = mix(state ^ mix(sampling.seed) ^ mix(mix(index)))
        forbidden = spec.forbidden(index, self._model.eos_token_ids)
        token = state % self._model.vocab_size
        if len(forbidden) < self._model.vocab_size:  # a token's choices are never all forbidden
            while token in forbidden:
                state = mix(state)
                token = state % self._model.vocab_size
        return SampledToken(token, self._logprobs(token, sampling))

    def _logprobs(self, token: int, sampling: SamplingParams) -> TokenLogprobs | None:
        """Make up log-probabilities with the shape and order of real ones."""
        if sampling.logprobs is None:
            return None
        vocab_size = self._model.vocab_size
        top = tuple(
            ((token + rank) % vocab_size, -float(rank + 1)) for rank in range(sampling.logprobs)
        )
        return TokenLogprobs(-1.0, 1, top)


def _masked(sampled: list[SampledToken], masks: Masks) -> list[SampledToken]:
    """Give each constrained row the allowed token that its own one leads to."""
    made = list(sampled)
    for row, bits in zip(masks.rows, masks.bits):
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        token = int(allowed[sampled[row].token_id % len(allowed)])
        made[row] = replace(sampled[row], token_id=token)
    for row, fault in masks.faults.items():
        made[row] = replace(sampled[row], fault=fault)
    return made


class _GroupKv:
    """One layer group's KV in memory."""

    def __init__(self, index: int, max_tokens: int, memory: KvMemory, region: RegionLayout) -> None:
        layout = region.layout
        self.spec = layout.groups[index]
        self._index = index
        self._block_size = layout.block_size
        tensors = self.spec.tensors
        block_bytes = region.tensor_block_bytes(tensors[0])
        self._places: U64 = mix_all(np.arange(max_tokens, dtype=np.uint64))
        num_planes = self.spec.num_layers * len(tensors)  # [layer][tensor], of equal size
        self._num_tensors = len(tensors)
        self._blocks_per_region = region.num_blocks
        self._kv: U64 = np.ndarray(
            (memory.num_regions, num_planes, region.num_blocks, _NUM_HEADS, layout.block_size),
            np.uint64,
            buffer=memory.buffer.data,
            offset=region.tensor_offset(self.spec.first_layer, tensors[0].name),
            strides=(
                memory.region_stride_bytes,
                block_bytes * region.num_blocks,
                block_bytes,
                layout.head_bytes(tensors[0]),
                8,
            ),
        )
        first_plane = self.spec.first_layer * len(tensors)
        self._keys: U64 = np.array(
            [
                [mix((first_plane + plane) * _NUM_HEADS + head + 1) for head in range(_NUM_HEADS)]
                for plane in range(num_planes)
            ],
            np.uint64,
        )
        self._weights: U64 = self._keys | np.uint64(1)

    def read_before(self, seqs: Sequence[ScheduledSeq], batch: _Batch) -> U64:
        """Read the digest before each sequence's first token: [num_seqs, planes * heads]."""
        last = np.maximum(batch.contexts - 1, 0)
        entries = zip(self._tables(seqs), (last // self._block_size).tolist())
        blocks = np.array([table[entry] for table, entry in entries])
        regions, inner = np.divmod(blocks, self._blocks_per_region)
        found = self._kv[regions, :, inner, :, last % self._block_size]
        before = np.where((batch.contexts > 0)[:, None, None], found, self._keys)
        return before.reshape(len(seqs), -1)

    def slots(self, seqs: Sequence[ScheduledSeq], batch: _Batch) -> Slots:
        """Find where each token's KV goes: region, block within it, slot within the block."""
        tables = self._tables(seqs)
        starts = np.cumsum([0, *(len(table) for table in tables[:-1])])
        entries = starts[batch.seqs] + batch.positions.astype(np.int64) // self._block_size
        blocks = np.concatenate(tables)[entries]
        assert blocks.all(), "KV would be written into the null block"
        regions, inner = np.divmod(blocks, self._blocks_per_region)
        return regions, inner, batch.positions.astype(np.int64) % self._block_size

    def write(self, layer: int, slots: Slots, values: U64) -> None:
        """Write a layer's part of `values` [num_tokens, planes * heads]."""
        regions, inner, offsets = slots
        planes = slice(layer * self._num_tensors, (layer + 1) * self._num_tensors)
        per_plane = values.reshape(len(values), *self._keys.shape)[:, planes]
        self._kv[regions, planes, inner, :, offsets] = per_plane

    def digest(self, seqs: Sequence[ScheduledSeq]) -> U64:
        """Hash all KV that each sequence's last token looks at: [num_seqs]."""
        ends = [seq.start + len(seq.token_ids) for seq in seqs]
        begins = [max(0, end - self.spec.window) if self.spec.window else 0 for end in ends]
        ranges = [
            (begin // self._block_size, -(-end // self._block_size))
            for begin, end in zip(begins, ends)
        ]
        counts = np.array([last - first for first, last in ranges])
        firsts = np.cumsum(counts) - counts
        tables = zip(self._tables(seqs), ranges)
        blocks = np.concatenate([table[first:last] for table, (first, last) in tables])
        ordinals = np.concatenate([np.arange(first, last) for first, last in ranges])
        regions, inner = np.divmod(blocks, self._blocks_per_region)
        positions = ordinals[:, None] * self._block_size + np.arange(self._block_size)
        seen = positions >= np.repeat(begins, counts)[:, None]
        seen &= positions < np.repeat(ends, counts)[:, None]
        places = self._places[positions]
        values = (
            self._kv[regions, :, inner] ^ places[:, None, None, :]
        )  # [block, plane, head, slot]
        sums = (values * seen[:, None, None, :]).sum(axis=-1, dtype=np.uint64)
        per_block = (sums * self._weights).sum(axis=(1, 2), dtype=np.uint64)
        return np.asarray(np.add.reduceat(per_block, firsts), np.uint64)

    def _tables(self, seqs: Sequence[ScheduledSeq]) -> list[npt.NDArray[np.int32]]:
        return [seq.block_tables[self._index] for seq in seqs]


@dataclass(frozen=True)
class _Batch:
    """The tokens of a step, sequence after sequence."""

    token_ids: U64  # [num_tokens]
    positions: U64  # [num_tokens]
    offsets: npt.NDArray[np.int64]  # [num_tokens], within the sequence's part of the step
    seqs: npt.NDArray[np.int64]  # [num_tokens], which sequence
    starts: npt.NDArray[np.int64]  # [num_seqs], index of the first token
    contexts: npt.NDArray[np.int64]  # [num_seqs], tokens whose KV is there already


def _pack(seqs: Sequence[ScheduledSeq]) -> _Batch:
    counts = np.array([len(seq.token_ids) for seq in seqs], np.int64)
    contexts = np.array([seq.start for seq in seqs], np.int64)
    starts = np.cumsum(counts) - counts
    index = np.repeat(np.arange(len(seqs)), counts)
    offsets = np.arange(int(counts.sum())) - starts[index]
    token_ids = np.concatenate([seq.token_ids for seq in seqs]).astype(np.uint64)
    positions = (contexts[index] + offsets).astype(np.uint64)
    return _Batch(token_ids, positions, offsets, index, starts, contexts)
