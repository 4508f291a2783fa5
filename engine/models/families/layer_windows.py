"""How far each layer looks back, as config files say it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.hf_config import HfConfig

Windows = tuple[int | None, ...]

SLIDING, FULL = "sliding_attention", "full_attention"


def one_window(hf: HfConfig, num_layers: int) -> Windows:
    """Give all layers the window, if there is one."""
    return (hf.size_or_none("sliding_window"),) * num_layers


def optional_window(hf: HfConfig, num_layers: int) -> Windows:
    """Give all layers the window, if `use_sliding_window` says so."""
    if not hf.flag("use_sliding_window", False):
        return (None,) * num_layers
    return one_window(hf, num_layers)


def layer_kinds(hf: HfConfig, default: Sequence[str]) -> Sequence[str]:
    """Read `layer_types`, a kind for each layer; missing: `default`."""
    kinds = hf.list_of("layer_types", str)
    if kinds is None:
        return default
    if len(kinds) != len(default) or not set(kinds) <= {SLIDING, FULL}:
        hf.wrong("layer_types", f"{kinds} for {len(default)} layers")
    return kinds


def windows_of_upper_layers(hf: HfConfig, num_layers: int) -> Windows:
    """Give the window to the layers that `layer_types` names, else to those from
    `max_window_layers` on."""
    window = optional_window(hf, 1)[0]
    first = hf.count("max_window_layers", 28)
    kinds = layer_kinds(hf, [SLIDING if i >= first else FULL for i in range(num_layers)])
    return tuple(window if kind == SLIDING else None for kind in kinds)
