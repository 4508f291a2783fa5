"""Make the demo model from nothing but a seed: corpus, tokenizer, training, checkpoint.

    python models/demo_training/train.py --out models/demo

The number of steps is fixed, so a slower machine gives the same model later, up to rounding. About
the recipe:
Muon on the matrices with AdamW on embedding and norms learns several times faster here than AdamW
alone; only answers count in the loss; lengths grow from 128 to 2,048, because looking things up is
learned among few words and then works among many.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from corpus import Make, Rows, pack, train_tokenizer
from documents import lesson_document, long_document, short_document, study_document
from export import write_checkpoint
from llama import Llama, Shape
from muon import Muon
from tokenizers import Tokenizer
from torch import Tensor

from engine.run.auto_choice import cpu_has_bf16


@dataclass(frozen=True)
class Source:
    """What a step trains on: rows of one kind of document; 2,048 tokens in every case."""

    name: str
    make: Make
    length: int
    rows_per_step: int


LESSONS = Source("lessons", lesson_document, 128, 16)
BRIEF = Source("brief", short_document, 256, 8)
SHORT = Source("short", short_document, 512, 4)
LONG = Source("long", long_document, 2048, 1)
STUDY = Source("study", study_document, 256, 8)
SOURCES = (LESSONS, BRIEF, SHORT, LONG, STUDY)
VALIDATION_SEED = 990_001
# Where a CPU has no instructions for bf16, fp32 is the faster one.
COMPUTE_DTYPE = torch.bfloat16 if cpu_has_bf16() else torch.float32


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result.

    Up to the end of the first cycle, a longer run does the same as a shorter one.
    """

    seed: int = 7
    num_steps: int = 4600
    warmup_steps: int = 40
    first_cycle_steps: int = 3350
    decay_steps: int = 1100  # the last steps of the first cycle, over which the rate falls
    second_cycle: float = 0.6  # where the second cycle starts, of the first's learning rate
    lesson_steps: int = 600
    brief_steps: int = 400
    mixed_steps: int = 800
    study_steps: int = 600
    # All further steps are mixed again, now with study among them.
    long_share: float = 0.45  # of mixed steps
    study_share: float = 0.25  # of the last mixed steps
    muon_lr: float = 0.01
    embedding_lr: float = 5e-3
    norm_lr: float = 2e-3
    weight_decay: float = 0.1
    final_lr: float = 0.02  # of the highest learning rate

    def sources(self) -> list[Source]:
        """What every step trains on."""
        drawn = np.random.default_rng(self.seed).random(self.num_steps)
        first = [LESSONS] * self.lesson_steps + [BRIEF] * self.brief_steps
        until = len(first) + self.mixed_steps
        first += [LONG if draw < self.long_share else SHORT for draw in drawn[len(first) : until]]
        first += [STUDY] * self.study_steps
        studied = self.long_share + self.study_share
        last = [
            LONG if draw < self.long_share else STUDY if draw < studied else SHORT
            for draw in drawn[len(first) :]
        ]
        return [*first, *last][: self.num_steps]

    def lr_factor(self, step: int) -> float:
        """Warm-up, flat, linear decay; then once more up, to less, and down."""
        if step < self.first_cycle_steps:
            risen = (step + 1) / self.warmup_steps
            left = (self.first_cycle_steps - step) / self.decay_steps
            height = min(1.0, left)
        else:
            risen = (step + 1 - self.first_cycle_steps) / self.warmup_steps
            left = (self.num_steps - step) / (self.num_steps - self.first_cycle_steps)
            height = self.second_cycle * left
        return min(1.0, risen) * (self.final_lr + (1 - self.final_lr) * height)


def optimizers(model: Llama, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the rest."""
    embedding = model.model.embed_tokens.weight
    matrices = [
        weight for weight in model.parameters() if weight.ndim == 2 and weight is not embedding
    ]
    norms = [weight for weight in model.parameters() if weight.ndim == 1]
    rest = [{"params": [embedding], "lr": recipe.embedding_lr},
            {"params": norms, "lr": recipe.norm_lr}]  # fmt: skip
    return [
        Muon(matrices, recipe.muon_lr, recipe.weight_decay, momentum=0.95, dtype=COMPUTE_DTYPE),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def batches(rows: Rows, per_step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids and weights, each [per_step, length + 1], in the order of the rows."""
    for start in range(0, len(rows.ids) - per_step + 1, per_step):
        part = slice(start, start + per_step)
        yield (
            torch.from_numpy(rows.ids[part].astype(np.int64)),
            torch.from_numpy(rows.counted[part].astype(np.float32)),
        )


def loss_of(model: Llama, ids: Tensor, weights: Tensor) -> Tensor:
    """The loss: in bf16 autocast, or all in fp32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=COMPUTE_DTYPE is torch.bfloat16):
        return model.loss(ids, weights, COMPUTE_DTYPE)


@torch.no_grad()
def validate(model: Llama, rows: Rows, per_step: int) -> float:
    """Mean loss over all rows."""
    losses = [loss_of(model, ids, weights).item() for ids, weights in batches(rows, per_step)]
    return sum(losses) / len(losses)


@dataclass
class Training:
    """A model, its optimizers and how many steps they have done; can be put aside in a file."""

    recipe: Recipe
    model: Llama
    step: int = 0
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.optims = optimizers(self.model, self.recipe)
        self.highest = [[group["lr"] for group in optim.param_groups] for optim in self.optims]

    def save(self, path: Path) -> None:
        """Write everything that later steps depend on."""
        state = {
            "model": self.model.state_dict(),
            "optims": [optim.state_dict() for optim in self.optims],
            "done": (self.step, self.num_tokens),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Continue where `save` was called."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optim, saved in zip(self.optims, state["optims"]):
            optim.load_state_dict(saved)
        self.step, self.num_tokens = state["done"]

    def do_step(self, ids: Tensor, weights: Tensor) -> float:
        """One step of every optimizer; returns the loss."""
        factor = self.recipe.lr_factor(self.step)
        for optim, lrs in zip(self.optims, self.highest):
            for group, lr in zip(optim.param_groups, lrs):
                group["lr"] = lr * factor
        loss = loss_of(self.model, ids, weights)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optim in self.optims:
            optim.step()
            optim.zero_grad(set_to_none=True)
        self.step += 1
        self.num_tokens += ids.shape[0] * (ids.shape[1] - 1)
        return loss.item()


def learn(training: Training, tokenizer: Tokenizer, state_file: Path | None) -> None:
    """Do the steps that are left, telling how it goes every 50 steps."""
    recipe, sources = training.recipe, training.recipe.sources()
    streams = {
        source: batches(
            pack(tokenizer, source.make, recipe.seed + index,
                 sources.count(source) * source.rows_per_step, source.length),
            source.rows_per_step,
        )
        for index, source in enumerate(SOURCES, start=1)
    }  # fmt: skip
    for source in sources[: training.step]:
        next(streams[source])
    print("; ".join(f"{sources.count(source)} steps of {source.name}" for source in SOURCES),
          flush=True)  # fmt: skip
    started, tokens_before = time.monotonic(), training.num_tokens
    recent: dict[str, list[float]] = {}
    for source in sources[training.step :]:
        loss = training.do_step(*next(streams[source]))
        recent.setdefault(source.name, []).append(loss)
        if training.step % 50 == 0 or training.step == len(sources):
            spent = time.monotonic() - started
            speed = (training.num_tokens - tokens_before) / spent
            losses = "  ".join(f"{k} {sum(v) / len(v):.3f}" for k, v in recent.items())
            recent.clear()
            print(f"step {training.step:5d}  {spent:6.0f} s  {speed:6.0f} tokens/s  "
                  f"loss: {losses}", flush=True)  # fmt: skip
            if state_file is not None:
                training.save(state_file)


def check(model: Llama, tokenizer: Tokenizer) -> str:
    """The validation losses, as a sentence."""
    losses = []
    for source in SOURCES:
        num_rows = 12 * source.rows_per_step
        rows = pack(tokenizer, source.make, VALIDATION_SEED, num_rows, source.length)
        losses.append(f"{source.name} {validate(model, rows, source.rows_per_step):.4f}")
    return f"validation loss: {', '.join(losses)}"


def main() -> None:
    """Read the arguments, train, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=Recipe.num_steps)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--state", type=Path, help="file to continue from after an interruption")
    arguments = parser.parse_args()
    recipe = Recipe(seed=arguments.seed, num_steps=arguments.steps)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(recipe.seed)
    shape = Shape()
    tokenizer = train_tokenizer(recipe.seed, shape.vocab_size)
    training = Training(recipe, Llama(shape))
    if arguments.state is not None and arguments.state.exists():
        training.load(arguments.state)
        print(f"continuing after step {training.step}", flush=True)
    num_weights = sum(weight.numel() for weight in training.model.parameters())
    print(f"{num_weights:,} parameters, computed in {COMPUTE_DTYPE}", flush=True)
    started = time.monotonic()
    learn(training, tokenizer, arguments.state)
    print(f"{training.num_tokens:,} tokens, {time.monotonic() - started:.0f} s in this run; "
          f"{check(training.model, tokenizer)}", flush=True)  # fmt: skip
    write_checkpoint(training.model, tokenizer, arguments.out)
    print(f"checkpoint written to {arguments.out}", flush=True)


if __name__ == "__main__":
    main()
