"""Rotary position embeddings: which frequencies a config asks for.

Formulas: RoFormer (arXiv:2104.09864); linear: position interpolation (arXiv:2306.15595); yarn:
arXiv:2309.00071; llama3: the scaling published with Llama 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.hf_config import HfConfig


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


def rope_from_hf(hf: HfConfig, head_dim: int) -> RopeConfig:
    """Read `rope_parameters`, or `rope_theta` with `rope_scaling`. Raises UnsupportedModelError."""
    key = "rope_parameters" if hf.raw("rope_parameters") else "rope_scaling"
    _refuse_two_meanings(hf, key)
    return rope_of(hf.section(key), hf, "rope_theta", head_dim)


def rope_of(scaling: HfConfig, hf: HfConfig, theta_key: str, head_dim: int) -> RopeConfig:
    """Read a rope from the object that describes it. Where that names no `rope_theta`, the key
    `theta_key` of `hf` says it. Raises UnsupportedModelError."""
    kind = scaling.raw("rope_type", scaling.raw("type", "default"))
    own_theta = scaling.raw("rope_theta") is not None
    theta = scaling.positive("rope_theta") if own_theta else hf.positive(theta_key)
    if scaling.raw("partial_rotary_factor", hf.raw("partial_rotary_factor", 1.0)) != 1.0:
        hf.wrong("partial_rotary_factor", "other than 1 is not supported")
    if not isinstance(kind, str) or kind not in _INVERSE_FREQUENCIES:
        known = ", ".join(_INVERSE_FREQUENCIES)
        scaling.wrong("rope_type", f"rope type {kind!r} is not supported; supported: {known}")
    if kind == "default":
        return RopeConfig(head_dim, theta)
    longest = hf.size("max_position_embeddings")
    original = scaling.size("original_max_position_embeddings", longest)
    factor = scaling.positive("factor", longest / original)
    return RopeConfig(
        head_dim,
        theta,
        kind,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=scaling.positive("low_freq_factor", 1.0),
        high_freq_factor=scaling.positive("high_freq_factor", 4.0),
        beta_fast=scaling.positive("beta_fast", 32.0),
        beta_slow=scaling.positive("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
        attention_factor=_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
    )


def _refuse_two_meanings(hf: HfConfig, key: str) -> None:
    """Raise UnsupportedModelError if both keys have different scalings (readers of such files
    use one or the other), or if each kind of layer has its own parameters."""
    sections = [hf.raw(name) for name in ("rope_parameters", "rope_scaling")]
    if all(isinstance(section, dict) and section for section in sections):
        one, other = ({**s, "type": s.get("rope_type", s.get("type"))} for s in sections)
        if any(one.get(k) != other.get(k) for k in {*one, *other} - {"rope_type", "rope_theta"}):
            hf.wrong(key, "rope_scaling says otherwise; leave one of them out")
    chosen = hf.raw(key)
    if isinstance(chosen, dict) and any(isinstance(value, dict) for value in chosen.values()):
        hf.wrong(key, "parameters for each kind of layer are not supported")


def _attention_factor(scaling: HfConfig, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = scaling.number_or_none("attention_factor")
    if given is not None:
        return given
    above, below = scaling.number_or_none("mscale"), scaling.number_or_none("mscale_all_dim")
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
    """Long waves are stretched by `factor`, short ones stay, and those between are blended."""
    plain = _default(rope)
    waves_in_context = rope.original_max_positions * plain / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((waves_in_context - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(rope: RopeConfig) -> torch.Tensor:
    """Dimensions that turn often within the original context stay; slow ones are stretched."""

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
    """Cosines and sines of a step's positions, for one rope."""

    def __init__(self, rope: RopeConfig, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope).to(device)
        self._factor = rope.attention_factor

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [n, head_dim / 2] each, for int positions [n]."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        return angles.cos() * self._factor, angles.sin() * self._factor
