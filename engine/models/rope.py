"""Rotary position embeddings: which frequencies a config asks for.

Formulas: RoFormer (arXiv:2104.09864); linear: position interpolation (arXiv:2306.15595); yarn:
arXiv:2309.00071; llama3: the scaling published with Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.models.errors import UnsupportedModelError


@dataclass(frozen=True)
class RopeConfig:
    """Frequencies of one model; fields beyond `theta` serve the scaling named by `kind`."""

    head_dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Scales cosines and sines."""


def rope_from_hf(hf: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """Read `rope_parameters`, or `rope_theta` with `rope_scaling`. Raises UnsupportedModelError."""
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = float(scaling.get("rope_theta", hf["rope_theta"]))
    if scaling.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError("config.json: partial_rotary_factor is not supported")
    if kind not in _INVERSE_FREQUENCIES:
        raise UnsupportedModelError(
            f"config.json: rope type {kind!r} is not supported; "
            f"supported: {', '.join(_INVERSE_FREQUENCIES)}"
        )
    if kind == "default":
        return RopeConfig(head_dim, theta)
    original = scaling.get("original_max_position_embeddings") or hf["max_position_embeddings"]
    factor = float(scaling.get("factor") or hf["max_position_embeddings"] / original)
    return RopeConfig(
        head_dim,
        theta,
        kind,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
    )


def _attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """Angle per position of each pair of dimensions: float32 [head_dim / 2]."""
    return _INVERSE_FREQUENCIES[rope.kind](rope)


def _default(rope: RopeConfig) -> torch.Tensor:
    exponent = torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim
    return 1.0 / (rope.theta**exponent)


def _linear(rope: RopeConfig) -> torch.Tensor:
    return _default(rope) / rope.factor


def _llama3(rope: RopeConfig) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    plain = _default(rope)
    waves_in_context = rope.original_max_positions * plain / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((waves_in_context - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(rope: RopeConfig) -> torch.Tensor:
    """Dimensions that turn often within the original context are kept, slow ones stretched."""

    def dimension(turns: float) -> float:
        length = rope.original_max_positions / (turns * 2 * math.pi)
        return rope.head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    if low == high:
        high += 0.001
    index = torch.arange(rope.head_dim // 2, dtype=torch.float32)
    stretched = ((index - low) / (high - low)).clamp(0.0, 1.0)
    plain = _default(rope)
    return plain / rope.factor * stretched + plain * (1 - stretched)


_INVERSE_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


class RotaryTable:
    """Cosines and sines of a step's positions."""

    def __init__(self, rope: RopeConfig, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope).to(device)
        self._factor = rope.attention_factor

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [n, head_dim / 2] each, for int positions [n]."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        return angles.cos() * self._factor, angles.sin() * self._factor
