"""Whether Triton's programs can run here. Importing this imports no Triton."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import sysconfig
from pathlib import Path

import torch

log = logging.getLogger(__name__)


@functools.cache
def runs_on(device_type: str) -> bool:
    """Tell whether Triton serves a device: cuda where it has what it needs, any in Triton's
    interpreter, which `TRITON_INTERPRET=1` asks for. One log line says what a GPU lacks."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return importlib.util.find_spec("triton") is not None
    if device_type != "cuda" or not torch.cuda.is_available():
        return False
    lacking = _lacking()
    if lacking is not None:
        log.warning("torch's kernels serve, which are several times slower: %s", lacking)
    return lacking is None


def _lacking() -> str | None:
    if torch.version.hip is not None or torch.cuda.get_device_capability() < (8, 0):
        return "the Triton kernels are for NVIDIA's GPUs from compute capability 8.0 on"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    # With both Triton builds what launches its programs.
    if "CC" not in os.environ and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton needs a C compiler"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    if not (Path(sysconfig.get_path("include", scheme)) / "Python.h").exists():
        return "Triton needs Python's headers"
    return None
