"""The training of the demo model, as the machine that runs it can."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from baton.config.engine import EngineConfig
from engine.request import SamplingParams
from engine.run.build import load_lone_engine
from tests.engine.greedy import run_alone
from tests.models.training_scripts import run
from tests.path.oracles import ids_of

NUM_TOKENS = 12

# Queries a block at a time, against all of them at once: prints the largest difference of the
# results and of the gradients, for each length.
ATTENTION = """
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

# Ten steps of a small model without a break, then five, put aside in a file, and five more; writes
# the checkpoint. Prints the validation loss before and after, and whether both runs end alike.
TRAIN = """
import sys
from pathlib import Path
import torch
import train
from corpus import pack, train_tokenizer
from export import write_checkpoint
from llama import Llama, Shape

torch.set_num_threads(1)
state, out = map(Path, sys.argv[1:])
shape = Shape(vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=2)
tokenizer = train_tokenizer(7, shape.vocab_size, num_documents=400)
unseen = pack(tokenizer, train.LESSONS.make, train.VALIDATION_SEED, 16, train.LESSONS.length)

def begin(num_steps):
    torch.manual_seed(7)
    return train.Training(train.Recipe(num_steps=num_steps, warmup_steps=2), Llama(shape))

whole = begin(10)
before = train.validate(whole.model, unseen, 16)
train.learn(whole, tokenizer, None)
train.learn(begin(5), tokenizer, state)
rest = begin(10)
rest.load(state)
train.learn(rest, tokenizer, None)
assert rest.num_tokens == whole.num_tokens == 10 * 2048, rest.num_tokens
ours, theirs = whole.model.state_dict(), rest.model.state_dict()
write_checkpoint(rest.model, tokenizer, out)
same = all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
print(before, train.validate(whole.model, unseen, 16), same)
"""


def test_attention_by_blocks_of_queries_is_that_of_all_at_once_and_so_are_its_gradients() -> None:
    differences = [*map(float, run(ATTENTION).split())]
    assert len(differences) == 4
    assert max(differences) < 1e-10


def test_muon_does_what_torch_s_does_in_either_dtype() -> None:
    in_bf16, in_fp32 = map(float, run(MUON).split())
    assert in_bf16 < 1e-5
    assert in_fp32 < 0.02


def test_a_step_computes_in_bf16_only_where_the_cpu_has_instructions_for_it() -> None:
    assert run(STEP).split() == ["torch.float32", "torch.bfloat16"]


def test_training_goes_on_after_a_break_as_without_and_the_engine_serves_what_it_writes(
    tmp_path: Path,
) -> None:
    out = tmp_path / "trained"
    before, after, same = run(TRAIN, str(tmp_path / "state"), str(out)).split()[-3:]
    assert float(after) < float(before) - 0.5
    assert same == "True"

    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(out)("Who is Mira?")["input_ids"]
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    config = EngineConfig(dtype="float32", num_blocks=16, num_threads=1, device="cpu")
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    [found] = run_alone(load_lone_engine(str(out), config), [prompt], greedy)
    assert ids_of(found) == ids[len(prompt) :]
