"""The trained model's attention is that of torch."""

from __future__ import annotations

from tests.models.training_scripts import run

# Queries a block at a time, against all of them at once: prints the largest difference of the
# results and of the gradients, for each length.
SCRIPT = """
import torch
import torch.nn.functional as functional
from llama import causal_attention

torch.set_num_threads(1)
torch.manual_seed(3)
for length in (7, 256, 300, 600):
    query, key, value = (
        torch.randn(2, heads, length, 16, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    towards = torch.randn_like(query)
    wide = [x.repeat_interleave(2, dim=1) for x in (key, value)]
    theirs = functional.scaled_dot_product_attention(query, *wide, is_causal=True)
    ours = causal_attention(query, key, value)
    gradients = [torch.autograd.grad(out, (query, key, value), towards) for out in (ours, theirs)]
    pairs = [(ours, theirs), *zip(*gradients)]
    print(max((a - b).abs().max().item() for a, b in pairs))
"""


def test_attention_by_blocks_of_queries_is_that_of_all_at_once_and_so_are_its_gradients() -> None:
    differences = [*map(float, run(SCRIPT))]
    assert len(differences) == 4
    assert max(differences) < 1e-10
