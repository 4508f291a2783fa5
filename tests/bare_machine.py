"""A GPU machine's Python: torch, numpy, safetensors and pytest, and little else."""

from __future__ import annotations

import os
from pathlib import Path

_LACKING = (
    *("ray", "grpc", "google", "libucx", "uvloop", "transformers", "tokenizers"),
    *("huggingface_hub", "yaml", "rich", "jinja2", "prometheus_client", "psutil", "kubernetes"),
    *("pytest_asyncio", "pytest_timeout", "hypothesis"),
)


def bare_environment(folder: Path) -> dict[str, str]:
    """For Python processes to which the project's other dependencies are not installed."""
    lacking = f"import sys\nsys.modules.update(dict.fromkeys({_LACKING!r}))\n"
    (folder / "sitecustomize.py").write_text(lacking)
    return os.environ | {"PYTHONPATH": str(folder)}
