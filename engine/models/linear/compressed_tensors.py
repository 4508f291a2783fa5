"""Checkpoints that compressed-tensors wrote: 8-bit weights of symmetric scales (W8A16).

The format's `quantization_config` in config.json says which modules are quantised and how. Beside a
module's numbers lie its scales (`weight_scale`), one an output or one a group of its inputs. There
are two layouts. "int-quantized" has int8 numbers (`weight`). "pack-quantized" has four of them,
each plus 128, in an int32 (`weight_packed`), and the shape apart (`weight_shape`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.errors import CheckpointError, ShardingError
from engine.hf_config import HfConfig
from engine.models.linear import int8
from engine.models.linear.floats import FLOATS
from engine.models.linear.int8 import Int8Rows
from engine.models.linear.method import MatrixSource, Method, WeightFormat

_LAYOUTS = ("pack-quantized", "int-quantized")
_PER_WORD = 4
_PATTERN = "re:"


@dataclass(frozen=True)
class CompressedInt8:
    layout: str
    group_size: int | None
    """Inputs that share a scale; None: all of an output."""
    targets: tuple[str, ...]
    """What is quantised: "Linear", names of modules, or patterns of them after "re:"."""
    ignore: tuple[str, ...]
    name: str = "compressed-tensors"

    @property
    def methods(self) -> tuple[Method, ...]:
        return int8.METHODS

    def of(self, module: str) -> WeightFormat:
        # An embedding is no "Linear", nor is the head that shares its tensor.
        is_linear = not module.endswith("embed_tokens")
        wanted = any(
            (each == "Linear" and is_linear) or _matches(each, module) for each in self.targets
        )
        return self if wanted and not any(_matches(e, module) for e in self.ignore) else FLOATS

    def read(
        self,
        source: MatrixSource,
        module: str,
        shape: tuple[int, int],
        rows: slice,
        columns: slice,
    ) -> Int8Rows:
        outputs, inputs = shape
        group = self.group_size or inputs
        if inputs % group:
            raise CheckpointError(
                f"{module}: {inputs} inputs are no multiple of group_size {group}"
            )
        start, stop, _ = columns.indices(inputs)
        if stop - start < inputs and self.group_size and (start % group or stop % group):
            raise ShardingError(f"{module}: ranks would split groups of {group} inputs")
        groups = slice(start // group, -(-stop // group))
        scales = source.floats(f"{module}.weight_scale", (outputs, inputs // group), rows, groups)
        if self.layout == "int-quantized":
            values = source.integers(f"{module}.weight", shape, torch.int8, rows, columns)
            return Int8Rows(values, scales)
        return Int8Rows(self._unpacked(source, module, shape, rows, (start, stop)), scales)

    def _unpacked(
        self,
        source: MatrixSource,
        module: str,
        shape: tuple[int, int],
        rows: slice,
        columns: tuple[int, int],
    ) -> torch.Tensor:
        outputs, inputs = shape
        stated = source.integers(f"{module}.weight_shape", (2,), torch.int64).tolist()
        if stated != [outputs, inputs]:
            raise CheckpointError(f"{module}.weight_shape is {stated}, not {[outputs, inputs]}")
        start, stop = columns
        if start % _PER_WORD or (stop % _PER_WORD and stop < inputs):
            raise ShardingError(f"{module}: ranks would split words of {_PER_WORD} inputs")
        words = slice(start // _PER_WORD, -(-stop // _PER_WORD))
        packed = (outputs, -(-inputs // _PER_WORD))
        found = source.integers(f"{module}.weight_packed", packed, torch.int32, rows, words)
        plus_128 = found.contiguous().view(torch.uint8)[:, : stop - start]
        return (plus_128 ^ 128).view(torch.int8)

    def num_bytes(self, outputs: int, inputs: int, item_bytes: int) -> int:
        return int8.num_bytes(outputs, inputs, self.group_size or inputs)


def read_config(hf: HfConfig) -> CompressedInt8:
    """Read config.json's `quantization_config`. Raises UnsupportedModelError naming what is not
    served."""
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if hf.raw(key) and hf.section(key).raw("format") != "dense":
            hf.wrong(key, "only quantised weights are supported")
    found = {_of_group(hf, group) for group in _groups(hf)}
    schemes = {(layout, group_size) for layout, group_size, _ in found}
    if len(schemes) != 1:
        hf.wrong("config_groups", "one scheme for all quantised weights is expected")
    layout, group_size = schemes.pop()
    targets = tuple(sorted({each for _, _, some in found for each in some}))
    return CompressedInt8(layout, group_size, targets, _names(hf, "ignore"))


def _groups(hf: HfConfig) -> Iterator[HfConfig]:
    groups = hf.section("config_groups")
    if not hf.raw("config_groups"):
        hf.wrong("config_groups", "a JSON object of schemes is expected")
    yield from map(groups.section, hf.raw("config_groups"))


def _of_group(hf: HfConfig, group: HfConfig) -> tuple[str, int | None, tuple[str, ...]]:
    """Read one scheme: its layout, size of groups or None, and targets."""
    for key in ("input_activations", "output_activations"):
        if group.raw(key):
            group.wrong(key, "quantised activations are not supported")
    weights = group.section("weights")
    bits, kind = weights.raw("num_bits", 8), weights.raw("type", "int")
    if (bits, kind) != (8, "int"):
        weights.wrong("num_bits", f"{bits} bits ({kind}) are not supported, 8 bits (int) are")
    layout = group.raw("format") or hf.raw("format")
    if layout not in _LAYOUTS:
        hf.wrong("format", f"{layout!r} is not supported; supported: {', '.join(_LAYOUTS)}")
    if not weights.flag("symmetric", True):
        weights.wrong("symmetric", "weights with zero points are not supported")
    if weights.raw("dynamic"):
        weights.wrong("dynamic", "scales that are computed while serving are not supported")
    # An order of the columns while scales were found leaves none in the file, unlike "group".
    if (order := weights.raw("actorder")) not in (None, False, "weight", "static"):
        weights.wrong("actorder", f"{order!r} is not supported: columns would be in another order")
    size = weights.raw("group_size")
    size = None if size == -1 else weights.size_or_none("group_size")
    strategy = weights.raw("strategy") or ("group" if size else "tensor")
    if strategy not in ("channel", "group") or (strategy == "group") != (size is not None):
        weights.wrong("strategy", f"{strategy!r} is not supported; supported: channel, group")
    return layout, size, _names(group, "targets")


def _names(hf: HfConfig, key: str) -> tuple[str, ...]:
    names = hf.list_of(key, str) or []
    for name in names:
        try:
            _matches(name, "")
        except re.error as error:
            hf.wrong(key, f"{name!r} is no pattern: {error}")
    return tuple(names)


def _matches(target: str, module: str) -> bool:
    if target.startswith(_PATTERN):
        return re.match(target.removeprefix(_PATTERN), module) is not None
    return target == module
