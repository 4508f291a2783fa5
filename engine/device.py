"""Where an engine computes: `device: auto` is a GPU where torch can use one, else the CPU."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from baton.config.engine import AUTO, EngineConfig


@dataclass(frozen=True)
class DeviceChoice:
    device: str
    """cpu or cuda."""
    reason: str


def why_no_gpu() -> str | None:
    """Why torch computes on no GPU here, in one sentence; None: it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an old driver is reported below, once
        if torch.cuda.is_available():
            return None
        if torch.version.cuda is None and torch.version.hip is None:
            return f"torch {torch.__version__} is built without CUDA"
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            said = str(error).strip().partition("\n")[0]
            return said.partition(". ")[0].rstrip(".") or type(error).__name__
    return "torch sees no GPU"


def choose_device(num_gpus: int = 1) -> DeviceChoice:
    """What `auto` means on this machine for workers that need `num_gpus` together."""
    reason = why_no_gpu()
    if reason is not None:
        return DeviceChoice("cpu", reason)
    if torch.cuda.device_count() < num_gpus:
        return DeviceChoice(
            "cpu",
            f"the pools need {num_gpus} GPUs, this machine has {torch.cuda.device_count()}; make"
            " them smaller, or one pool of role mixed",
        )
    return DeviceChoice("cuda", torch.cuda.get_device_name())


def device_of(config: EngineConfig) -> torch.device:
    """The device that an engine of this configuration computes on."""
    return torch.device(choose_device().device if config.device == AUTO else config.device)
