"""All formats of weights by name. A checkpoint of a format that is not here is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.hf_config import HfConfig
from engine.models.linear import compressed_tensors
from engine.models.linear.floats import FLOATS
from engine.models.linear.int8 import Int8AtLoad
from engine.models.linear.method import WeightFormat

FORMATS: Mapping[str, Callable[[HfConfig], WeightFormat]] = {
    "compressed-tensors": compressed_tensors.read_config,
}
"""`quant_method` of config.json's `quantization_config` -> what reads the rest of it."""

AT_LOAD: Mapping[str, WeightFormat] = {"int8": Int8AtLoad()}
"""`engine.quantization` -> the format that floating-point weights get while they are read."""


def format_of(hf: HfConfig) -> WeightFormat:
    """The format of a config.json's checkpoint. Raises UnsupportedModelError."""
    settings = hf.raw("quantization_config")
    if not settings:
        return FLOATS
    name = str(settings.get("quant_method") if isinstance(settings, dict) else settings)
    if name not in FORMATS:
        hf.wrong(
            "quantization_config",
            f"quantised weights ({name}) are not supported; supported: {', '.join(FORMATS)}",
        )
    return FORMATS[name](hf.section("quantization_config"))


def quantised(stored: WeightFormat, name: str) -> WeightFormat:
    """What `engine.quantization` makes of a checkpoint's format. One that is quantised stays so."""
    return AT_LOAD.get(name, stored) if stored == FLOATS else stored
