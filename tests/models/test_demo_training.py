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


def test_a_step_computes_in_bf16_only_where_the_cpu_has_instructions_for_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STEP], cwd=TRAINING, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["torch.float32", "torch.bfloat16"], done.stderr
