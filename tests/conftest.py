"""What holds for every test."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest

# Before anything imports gRPC. Where another thread is in a call, its fork handlers end the child
# of a fork before it becomes the program it was made for (56 of 764 children). Ray starts its
# processes by fork, and so do tests that set a child's signals; whoever forks here runs a program.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

_IDENTITIES = tempfile.TemporaryDirectory(prefix="baton-identities-")
with contextlib.suppress(ModuleNotFoundError):  # a machine that has little but torch
    from tests.identities import used_everywhere

    used_everywhere(Path(_IDENTITIES.name))


def pytest_configure(config: pytest.Config) -> None:
    """What is not marked `gpu` is about the CPU, also on a machine that has GPUs."""
    if config.getoption("markexpr") != "gpu" and os.path.exists("/dev/nvidiactl"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
