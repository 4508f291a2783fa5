"""The GPU's programs in Triton's interpreter, by the tests that a GPU runs, in another process.

Not bfloat16: the interpreter's products are wrong in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.kernels.native.native_kernels import pick_kernels

ROOT = Path(__file__).parents[2]
PARTS = {
    "kernels": "not bfloat16 and not piece_by_piece",
    "graphs": "padded or buckets",
    "sampling": "plain and filters",
    "int8": "not bfloat16",
}


@pytest.mark.timeout(400)  # a process that runs tests, perhaps beside others
@pytest.mark.parametrize("part", PARTS)
def test_interpreted_programs_do_what_the_definition_says(part: str) -> None:
    pytest.importorskip("triton")
    command = [
        *(sys.executable, "-m", "pytest", "-c", "bench/gpu/pytest.ini", "--rootdir", str(ROOT)),
        *("-m", "gpu", "--device", "cpu", "-k", PARTS[part], f"tests/engine/gpu/test_{part}.py"),
    ]
    interpreted = {"TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | interpreted,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_or_the_interpreter_torchs_kernels_serve() -> None:
    assert pick_kernels(torch.device("cuda"), torch.bfloat16).name == "torch"
