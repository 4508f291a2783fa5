"""The node's driver beside the CUDA that torch was built for, and the GPUs that torch sees."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path

from cluster.preflight.check import Check, Wanted, failure, ok, warning

_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""By CUDA's major version: what each of its minor versions runs on
(docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)."""
_DRIVER = re.compile(r"Kernel Module(?: for \S+)? +([0-9]+(?:\.[0-9]+)+)")


def check_gpus(root: Path, wanted: Wanted) -> list[Check]:
    driver, cuda = driver_version(root), torch_cuda()
    num_seen = num_gpus_seen() if cuda and (driver or wanted.num_gpus) else 0
    checks = [check_driver(driver, cuda, num_seen, wanted)]
    return checks + ([check_number(num_seen, wanted)] if wanted.num_gpus else [])


def check_driver(driver: str | None, cuda: str | None, num_seen: int, wanted: Wanted) -> Check:
    """Versions as they are written; None: no driver, a torch without CUDA."""
    own_image = "a worker image with CUDA (make images builds one unless TORCH_INDEX says cpu)"
    if driver is None and not wanted.num_gpus:
        return ok("driver", "no NVIDIA driver, and no GPU asked for")
    if driver is None:
        return failure(
            "driver",
            "no NVIDIA driver here",
            "install it on the node (NVIDIA's GPU operator does), and request nvidia.com/gpu",
        )
    if cuda is None and not wanted.num_gpus:
        return warning("driver", f"{driver}, but torch is built without CUDA", own_image)
    if cuda is None:
        return failure("driver", f"{driver}, but torch is built without CUDA", own_image)
    found = f"{driver}, torch is built for CUDA {cuda}"
    major = int(cuda.partition(".")[0])
    oldest = _OLDEST_DRIVERS.get(major, 0)
    if int(driver.partition(".")[0]) >= oldest or num_seen:  # the image may bring a newer libcuda
        return ok("driver", found)
    return failure(
        "driver",
        f"{found}, which needs {oldest} or newer",
        f"upgrade the node's driver to {oldest} or newer, or take a torch for CUDA {major - 1}",
    )


def check_number(num_seen: int, wanted: Wanted) -> Check:
    found = f"torch sees {num_seen} of {wanted.num_gpus}"
    if num_seen >= wanted.num_gpus:
        return ok("GPUs", found)
    return failure(
        "GPUs",
        found,
        "the pod's limits must name as many nvidia.com/gpu (parallelism.tensor says how many); "
        "where they do, nvidia-smi on the node tells which GPU fails",
    )


def driver_version(root: Path) -> str | None:
    """Of the kernel's module."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = _DRIVER.search(text)
    return found[1] if found else None


def torch_cuda() -> str | None:
    """From torch's own version file: importing torch takes seconds. None: built without CUDA, or
    not installed."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    cuda = runpy.run_path(str(Path(found.origin).with_name("version.py"))).get("cuda")
    return cuda if isinstance(cuda, str) else None


def num_gpus_seen() -> int:
    import torch  # of a machine without a driver nobody asks

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
