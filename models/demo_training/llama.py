"""The demo model: a Llama in plain PyTorch, small enough to train on two CPU cores.

Parameters are named as in Hugging Face's `LlamaForCausalLM`, so a state dict is a checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

# An embedding as small as is usual (0.02) drowns in what the first layer adds, and then copying a
# name from the prompt is learned late or never. The final norm starts where logits have std 1.
EMBEDDING_STD = 0.25
QUERY_BLOCK = 256


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults give 3.47 million parameters, 6.95 MB in bf16."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    max_positions: int = 4096


def rope_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0..length-1, each [length, head_dim], half-split."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-half)
    both = torch.cat([angles, angles], dim=-1)
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys [batch, heads, length, head_dim] by their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


@cache
def causal_mask(rows: int, repeats: int, max_length: int, dtype: torch.dtype) -> Tensor:
    """[repeats x rows, max_length], added to the scores of the last `rows` of so many positions."""
    seen = torch.zeros(rows, max_length - rows)
    hidden_later = torch.full((rows, rows), -math.inf).triu(1)
    return torch.cat([seen, hidden_later], dim=1).repeat(repeats, 1).to(dtype)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Grouped-query attention [batch, heads, length, head_dim] of keys and values that have fewer
    heads. A block of queries at a time, as plain products: on CPUs with bf16 instructions forward
    and backward take 0.3 to 0.7 of what `scaled_dot_product_attention` does (measured)."""
    batch, num_heads, length, head_dim = query.shape
    num_kv_heads = key.shape[1]
    repeats = num_heads // num_kv_heads
    query = query.reshape(batch * num_kv_heads, repeats, length, head_dim)
    key, value = (x.reshape(batch * num_kv_heads, length, head_dim) for x in (key, value))
    mixed = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        mask = causal_mask(end - start, repeats, length, query.dtype)[:, length - end :]
        rows = query[:, :, start:end].reshape(batch * num_kv_heads, -1, head_dim)
        scores = torch.baddbmm(mask, rows, key[:, :end].mT, alpha=head_dim**-0.5)
        out = scores.softmax(dim=-1) @ value[:, :end]
        mixed.append(out.view(batch * num_kv_heads, repeats, end - start, head_dim))
    return torch.cat(mixed, dim=2).view(batch, num_heads, length, head_dim)


class Norm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        query_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        head_dim = self.shape.head_dim

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, head_dim).transpose(1, 2)

        query = rotate(heads(self.q_proj(x)), cos, sin)
        key = rotate(heads(self.k_proj(x)), cos, sin)
        mixed = causal_attention(query, key, heads(self.v_proj(x)))
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    """The gated SiLU feed-forward of Llama."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kept: Tensor | None = None) -> Tensor:
        """[batch, length, hidden]; of the positions in `kept` [batch, length] alone where it is
        given, [positions, hidden]: others see no more of a position than its keys and values."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        if kept is not None:
            x = x[kept]
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Embedding, layers and final norm: everything below the (tied) head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Llama(nn.Module):
    """The whole model. Its head is the embedding, transposed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self._tables: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._initialise()

    def _initialise(self) -> None:
        # Layers that write to the residual stream start small, so that depth does not add variance.
        depth = 1 / math.sqrt(2 * self.shape.num_layers)
        head_std = EMBEDDING_STD * math.sqrt(self.shape.hidden_size)
        nn.init.constant_(self.model.norm.weight, 1 / head_std)
        for name, weight in self.named_parameters():
            if "embed" in name:
                nn.init.normal_(weight, std=EMBEDDING_STD)
            elif weight.ndim == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.7 / math.sqrt(weight.shape[1])
                nn.init.normal_(weight, std=scale * (depth if writes else 1.0))

    def hidden(self, token_ids: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """Final hidden states [positions, hidden] of token ids [batch, length], where `kept`."""
        length = token_ids.shape[1]
        if (length, dtype) not in self._tables:
            cos, sin = rope_tables(self.shape, length)
            self._tables[length, dtype] = cos.to(dtype), sin.to(dtype)
        cos, sin = self._tables[length, dtype]
        x = self.model.embed_tokens(token_ids).to(dtype)
        *lower, last = self.model.layers
        for layer in lower:
            x = layer(x, cos, sin)
        out: Tensor = self.model.norm(last(x, cos, sin, kept))
        return out

    def loss(self, token_ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Weighted mean cross-entropy of the next token; both arguments are [batch, length].

        `weights` says how much predicting each token counts. Positions of weight 0 skip the last
        feed-forward and the head, a good part of a step when most of a row is a question's context.
        """
        counted = weights[:, 1:] > 0
        wanted, weight = token_ids[:, 1:][counted], weights[:, 1:][counted]
        hidden = self.hidden(token_ids[:, :-1], counted, dtype)
        logits = functional.linear(hidden, self.model.embed_tokens.weight).float()
        each = functional.cross_entropy(logits, wanted, reduction="none")
        return (each * weight).sum() / weight.sum()
