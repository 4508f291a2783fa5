"""The training of the demo model, as the machine that runs it can."""

from __future__ import annotations

import subprocess
import sys

from tests.models.test_demo_corpus import TRAINING

# One step of a small model on a CPU that has bf16 instructions or not, in a process of its own: the
# scripts are modules beside each other. Prints what its layers computed in.
STEP = """
import importlib, sys
import torch
import train
from llama import Llama, Shape

torch.set_num_threads(1)
for has_bf16 in (False, True):
    torch.cpu.get_capabilities = lambda: {"avx512_f": True, "avx512_bf16": has_bf16}
    importlib.reload(train)
    model = Llama(Shape(vocab_size=64, num_layers=1))
    seen = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, args, out: seen.add(str(out.dtype)))
    training = train.Training(train.Recipe(), model)
    loss = training.do_step(torch.ones(1, 9, dtype=torch.long), torch.ones(1, 9))
    assert 0 < loss < 100, loss
    print(*seen)
"""

# Some steps of Muon beside those of torch's own, which computes in bf16 whatever the CPU. Prints
# how far weights are from torch's, of the way that they went.
MUON = """
import sys
import torch
from muon import Muon

torch.set_num_threads(1)
shapes = [(64, 64)] * 3 + [(32, 64)] * 2 + [(128, 64), (64, 128)]
for dtype in (torch.bfloat16, torch.float32):
    torch.manual_seed(1)
    start = [torch.randn(shape) for shape in shapes]
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
    steps = (
        Muon(ours, lr=0.01, weight_decay=0.1, momentum=0.95, dtype=dtype),
        torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, momentum=0.95),
    )
    for _ in range(3):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in steps:
            optimizer.step()
    print(max(((a - b).norm() / (b - w).norm()).item() for a, b, w in zip(ours, theirs, start)))
"""


def run(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=TRAINING, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout.split()


def test_muon_does_what_torch_s_does_in_either_dtype() -> None:
    in_bf16, in_fp32 = map(float, run(MUON))
    assert in_bf16 < 1e-5
    assert in_fp32 < 0.02


def test_a_step_computes_in_bf16_only_where_the_cpu_has_instructions_for_it() -> None:
    assert run(STEP) == ["torch.float32", "torch.bfloat16"]
