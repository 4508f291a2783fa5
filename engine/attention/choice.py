"""Which kernels serve a device and a dtype."""

from __future__ import annotations

import torch

from engine.attention.kernels import Kernels
from engine.attention.native_kernels import NativeKernels
from engine.attention.native_library import native_library
from engine.attention.torch_kernels import TorchKernels


def pick_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest kernels that work here."""
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        library = native_library()
        if library is not None:
            return NativeKernels(library)
    return TorchKernels()
