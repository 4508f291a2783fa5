"""The decoder: token ids and block tables in, hidden states and logits out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from engine.kernels.paged_kv import PagedKv
from engine.kernels.protocol import AttentionShape, Kernels, Rotation
from engine.kernels.step_batch import StepBatch
from engine.models.config import ModelConfig
from engine.models.fused_layers import FusedLayers
from engine.models.loading import DecoderWeights
from engine.models.rope import RotaryTable
from engine.models.sharding import Shard


class Collectives(Protocol):
    """What the decoder asks of the other tensor-parallel ranks."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Rank 0 gets the ranks' equally many columns side by side, the others None."""


class Decoder:
    """One rank's part of the model. Without `collectives` it is the whole model."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        shard: Shard,
        kernels: Kernels,
        collectives: Collectives | None,
    ) -> None:
        self._config = config
        self._weights = weights
        self._shard = shard
        self._kernels = kernels
        self._collectives = collectives
        self._rotary = [RotaryTable(rope, self.device) for rope in config.distinct_ropes]
        self._rotation_of = [config.distinct_ropes.index(rope) for rope in config.ropes]
        # The scale as the model's dtype has it, as transformers multiplies.
        scale = torch.tensor(config.embedding_scale, dtype=weights.dtype)
        self._embedding_scale = float(scale)
        self._attention = AttentionShape(
            *(len(shard.heads), len(shard.kv_heads), config.head_dim),
            eps=config.rms_norm_eps,
            scale=config.attention_scale,
        )
        self._fused: FusedLayers | None = None
        if collectives is None:
            self._fused = FusedLayers.of(weights, config, self._attention, kernels)

    @property
    def device(self) -> torch.device:
        return self._weights.norm.device

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    @property
    def attention(self) -> AttentionShape:
        """Sizes of this rank's attention."""
        return self._attention

    @property
    def host_waits(self) -> bool:
        """Whether `forward` makes the host wait for the device or other ranks."""
        layers = self._weights.layers
        return self._collectives is not None or any(layer.mlp.host_waits for layer in layers)

    def forward(
        self, batch: StepBatch, kv: PagedKv, layer_done: Callable[[int], None] | None
    ) -> torch.Tensor:
        """Write the KV of the batch's tokens and return their hidden states, [n, hidden].

        The last norm is not applied yet. `layer_done(layer)` is called when the layer's KV is
        written; None: nobody asks.
        """
        kernels, eps = self._kernels, self._config.rms_norm_eps
        rotations = [Rotation(*table.at(batch.positions)) for table in self._rotary]
        residual = self._embed(batch.token_ids)
        if self._fused is not None:
            self._fused.forward(residual, batch, rotations, kv, layer_done)
            return residual
        added: torch.Tensor | None = None  # what the layer before still owes the residual
        for index, layer in enumerate(self._weights.layers):
            group = batch.groups[kv.layout.group_of_layer(index)]
            layer_kv = kv.layers[index]
            if added is None:
                x = kernels.rms_norm(residual, layer.input_norm, eps)
            else:
                x = kernels.add_rms_norm(added, residual, layer.input_norm, eps)
            rotation = rotations[self._rotation_of[index]]
            queries = kernels.rotate_and_write(
                layer.qkv.apply(x), self._attention, layer.head_norms, rotation, layer_kv, group
            )
            if layer_done is not None:
                layer_done(index)
            window = self._config.windows[index]
            attended = kernels.attend(queries, layer_kv, batch, group, self._attention, window)
            x = self._sum_ranks(layer.attention_out.apply(attended.flatten(1)))
            if layer.attention_out_norm is not None:
                x = kernels.rms_norm(x, layer.attention_out_norm, eps)
            x = kernels.add_rms_norm(x, residual, layer.mlp_norm, eps)
            added = self._sum_ranks(layer.mlp(x, kernels))
            if layer.mlp_out_norm is not None:
                added = kernels.rms_norm(added, layer.mlp_out_norm, eps)
        return residual if added is None else residual.add_(added)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """float32 [n, vocab_size] for hidden states [n, hidden] of `forward`; None on ranks > 0."""
        x = self._kernels.rms_norm(hidden, self._weights.norm, self._config.rms_norm_eps)
        logits = self._weights.head.apply(x, torch.float32)
        if self._collectives is None:
            return logits
        # Only the last ranks' parts of the vocabulary can be smaller: what pads them is at the end.
        rows = -(-self._config.vocab_size // self._shard.size)
        padded = F.pad(logits, (0, rows - logits.shape[1]))
        gathered = self._collectives.gather_logits(padded)
        return None if gathered is None else gathered[:, : self._config.vocab_size]

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded = self._looked_up(token_ids)
        return embedded if self._embedding_scale == 1 else embedded.mul_(self._embedding_scale)

    def _looked_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._collectives is None:
            return F.embedding(token_ids, self._weights.embedding).to(self._weights.dtype)
        mine = self._shard.vocab
        local = token_ids - mine.start
        elsewhere = (local < 0) | (local >= len(mine))
        found = F.embedding(local.masked_fill(elsewhere, 0), self._weights.embedding)
        found = found.to(self._weights.dtype)
        return self._collectives.all_reduce(found.masked_fill_(elsewhere[:, None], 0))

    def _sum_ranks(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._collectives is None else self._collectives.all_reduce(x)
