"""Which kernels serve a device."""

from __future__ import annotations

import torch

from engine.attention.kernels import Kernels
from engine.attention.torch_kernels import TorchKernels


def pick_kernels(device: torch.device) -> Kernels:
    """The fastest kernels that work here."""
    return TorchKernels()
