"""A decoder's shape, read from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import UnsupportedModelError
from engine.models.hf_config import HfConfig
from engine.models.linear.floats import FLOATS
from engine.models.linear.method import WeightFormat
from engine.models.linear.table import format_of
from engine.models.rope import RopeConfig, rope_from_hf
from kv_transfer.layout import KvLayout, LayerGroup, TensorSpec

_MOST_LAYERS = 10_000


@dataclass(frozen=True)
class MoeConfig:
    """Sparse MLPs: which layers have them and how a token chooses its experts."""

    layers: tuple[int, ...]
    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalise: bool
    """Whether the chosen experts' probabilities are scaled to sum to 1."""
    block_name: str
    """The layer's module in tensor names: mlp or block_sparse_moe."""
    projections: tuple[str, str, str]
    """An expert's gate, up and down projections in tensor names."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides the decoder's arithmetic; sizes are over all ranks."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Per layer: tokens it looks back, itself included; None for all."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoeConfig | None = None
    weights: WeightFormat = FLOATS
    """How the matrices of products are kept."""

    @property
    def longest_context(self) -> int:
        """Tokens. YaRN reaches beyond the positions that the config states."""
        if self.rope.kind != "yarn":
            return self.max_position_embeddings
        stretched = int(self.rope.original_max_positions * self.rope.factor)
        return max(self.max_position_embeddings, stretched)

    def kv_layout(self, block_size: int, dtype: str) -> KvLayout:
        """K and V of every layer; each run of layers with one window is a group."""
        tensors = tuple(
            TensorSpec(name, self.num_kv_heads, self.head_dim, dtype) for name in ("k", "v")
        )
        runs = _runs(self.windows)
        groups = (LayerGroup(first, count, tensors, window) for first, count, window in runs)
        return KvLayout(block_size, tuple(groups))


def _runs(windows: tuple[int | None, ...]) -> Iterator[tuple[int, int, int | None]]:
    first = 0
    for layer in range(1, len(windows) + 1):
        if layer == len(windows) or windows[layer] != windows[first]:
            yield first, layer - first, windows[first]
            first = layer


@dataclass(frozen=True)
class Family:
    """What one architecture adds to the common decoder, and its config's defaults."""

    windows: Callable[[HfConfig, int], tuple[int | None, ...]]
    moe: Callable[[HfConfig, int], MoeConfig | None] | None = None
    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: config's attention_bias decides
    defaults: Mapping[str, Any] | None = None


def _no_windows(hf: HfConfig, num_layers: int) -> tuple[int | None, ...]:
    return (None,) * num_layers


def _one_window(hf: HfConfig, num_layers: int) -> tuple[int | None, ...]:
    return (hf.size_or_none("sliding_window"),) * num_layers


def _optional_window(hf: HfConfig, num_layers: int) -> tuple[int | None, ...]:
    if not hf.flag("use_sliding_window", False):
        return (None,) * num_layers
    return _one_window(hf, num_layers)


def _windows_of_upper_layers(hf: HfConfig, num_layers: int) -> tuple[int | None, ...]:
    """Qwen: `layer_types` if given, else the layers from `max_window_layers` on."""
    window = _optional_window(hf, 1)[0]
    types = hf.list_of("layer_types", str)
    if types is None:
        first = hf.count("max_window_layers", 28)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {"sliding_attention", "full_attention"}:
        hf.wrong("layer_types", f"{types} for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _mixtral_moe(hf: HfConfig, num_layers: int) -> MoeConfig:
    num_experts = hf.size("num_local_experts", 8)
    return MoeConfig(
        layers=tuple(range(num_layers)),
        num_experts=num_experts,
        num_experts_per_token=hf.size("num_experts_per_tok", 2, most=num_experts),
        intermediate_size=hf.size("intermediate_size"),
        normalise=True,
        block_name="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )


def _qwen3_moe(hf: HfConfig, num_layers: int) -> MoeConfig | None:
    num_experts = hf.count("num_experts", hf.count("num_local_experts", 128))
    if num_experts == 0:
        return None
    step = hf.size("decoder_sparse_step", 1)
    dense = set(hf.list_of("mlp_only_layers", int) or ())
    sparse = (i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    return MoeConfig(
        layers=tuple(sparse),
        num_experts=num_experts,
        num_experts_per_token=hf.size("num_experts_per_tok", 8, most=num_experts),
        intermediate_size=hf.size("moe_intermediate_size", 768),
        normalise=hf.flag("norm_topk_prob", False),
        block_name="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
    )


# Defaults are those of the published config classes, for keys a config.json may leave out.
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(_no_windows, defaults={"max_position_embeddings": 2048}),
    "MistralForCausalLM": Family(
        _one_window,
        defaults={
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "max_position_embeddings": 131072,
        },
    ),
    "Qwen2ForCausalLM": Family(
        _windows_of_upper_layers, qkv_bias=True, defaults={"sliding_window": 4096}
    ),
    "Qwen3ForCausalLM": Family(
        _windows_of_upper_layers,
        qk_norm=True,
        defaults={"sliding_window": 4096, "head_dim": 128, "num_key_value_heads": 32},
    ),
    "MixtralForCausalLM": Family(
        _one_window,
        _mixtral_moe,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        _optional_window,
        _qwen3_moe,
        qk_norm=True,
        defaults={"sliding_window": 4096, "num_key_value_heads": 4},
    ),
}

_COMMON_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def model_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Read the content of the config.json at `source`.

    Raises UnsupportedModelError naming the architecture, or the file and the key in it.
    """
    hf = HfConfig(raw, source)
    name = (hf.list_of("architectures", str) or ["(none)"])[0]
    family = FAMILIES.get(name)
    if family is None:
        raise UnsupportedModelError(
            f"{source}: architecture {name} is not supported; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    missing = [key for key in _REQUIRED if raw.get(key) is None]
    if missing:
        raise UnsupportedModelError(f"{source}: {name} lacks {', '.join(missing)}")
    hf = hf.over({**_COMMON_DEFAULTS, **(family.defaults or {})})
    _refuse_unknown_arithmetic(hf)
    num_layers = hf.size("num_hidden_layers", most=_MOST_LAYERS)
    num_heads, num_kv_heads, head_dim = _heads(hf)
    attention_bias = hf.flag("attention_bias", False)
    return ModelConfig(
        architecture=name,
        vocab_size=hf.size("vocab_size"),
        hidden_size=hf.size("hidden_size"),
        intermediate_size=hf.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=hf.positive("rms_norm_eps"),
        max_position_embeddings=hf.size("max_position_embeddings"),
        rope=rope_from_hf(hf, head_dim),
        windows=family.windows(hf, num_layers),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias and family.qkv_bias is None,
        mlp_bias=hf.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        moe=family.moe(hf, num_layers) if family.moe else None,
        weights=format_of(hf),
    )


def _heads(hf: HfConfig) -> tuple[int, int, int]:
    """Attention heads, key-value heads, and the width of each."""
    num_heads = hf.size("num_attention_heads")
    num_kv_heads = hf.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        hf.wrong(
            "num_key_value_heads",
            f"{num_heads} attention heads are no multiple of {num_kv_heads} key-value heads",
        )
    head_dim = hf.size_or_none("head_dim") or hf.size("hidden_size") // num_heads
    if head_dim < 1 or head_dim % 2:  # rotary embeddings turn pairs
        hf.wrong("head_dim", f"an even number of dimensions is expected, not {head_dim}")
    return num_heads, num_kv_heads, head_dim


def _refuse_unknown_arithmetic(hf: HfConfig) -> None:
    """Settings that change results and that the decoder does not implement."""
    activation = hf.raw("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        hf.wrong("hidden_act", f"{activation!r} is not supported")
