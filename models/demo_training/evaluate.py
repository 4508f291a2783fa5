"""Measure a checkpoint of the demo model with greedy decoding.

    python models/demo_training/evaluate.py models/demo

Texts come from the generator with seeds that training never used. An answer is right when it is the
expected sentence, word for word; a story request is kept when every name and thing in it occurs.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from documents import Context, over_context
from grammar import new_name, with_article
from questions import VILLAGE_FACTS, WORLD_FACTS
from stories import ASKS, HELD_OUT_ASKS
from talk import LARGEST, addition, refusal, subtraction, unknown_person, word_problem
from transformers import AutoTokenizer, LlamaForCausalLM
from words import ANIMALS, BOYS, GIRLS

Message = dict[str, str]
SEED = 424_242
BATCH = 16


@dataclass(frozen=True)
class Case:
    """One conversation and what its answer must be, or must contain."""

    messages: list[Message]
    expected: tuple[str, ...]
    exact: bool = True

    def passed(self, answer: str) -> bool:
        """Is the answer right?"""
        if self.exact:
            return answer.strip() == self.expected[0]
        return all(word in answer for word in self.expected)


def single(asked: str, answer: str) -> Case:
    """A one-message conversation with an exact answer."""
    return Case([{"role": "user", "content": asked}], (answer,))


class Reader:
    """A checkpoint that answers greedily."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def answers(self, conversations: list[list[Message]], max_tokens: int) -> list[str]:
        """One answer to each conversation."""
        out: list[str] = []
        for start in range(0, len(conversations), BATCH):
            texts = [
                self.tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False)
                for one in conversations[start : start + BATCH]
            ]
            batch = self.tokenizer(
                texts, add_special_tokens=False, padding=True, return_tensors="pt",
                return_token_type_ids=False,
            )  # fmt: skip
            with torch.inference_mode():
                generated = self.model.generate(
                    **batch, max_new_tokens=max_tokens, do_sample=False, temperature=None
                )
            new = generated[:, batch["input_ids"].shape[1] :]
            out += self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return out


def world_cases(rng: random.Random) -> list[Case]:
    """Facts of the village, in wordings of the training."""
    facts = rng.sample((*WORLD_FACTS, *VILLAGE_FACTS), 120)
    return [single(rng.choice(fact.wordings), fact.answer) for fact in facts]


def lower_cases(rng: random.Random) -> list[Case]:
    """The same in lower case, without the question mark."""
    facts = rng.sample((*WORLD_FACTS, *VILLAGE_FACTS), 120)
    return [single(rng.choice(fact.wordings).lower().rstrip("?."), fact.answer) for fact in facts]


def paraphrase_cases(rng: random.Random) -> list[Case]:
    """Facts of the village, in wordings that training never showed."""
    return [single(fact.held_out, fact.answer) for fact in WORLD_FACTS if fact.held_out]


def sum_cases(rng: random.Random) -> list[Case]:
    """Every sum up to 20."""
    return [
        single(f"What is {x} plus {y}?", f"{x} plus {y} is {x + y}.")
        for x in range(LARGEST + 1)
        for y in range(LARGEST + 1 - x)
    ]


def difference_cases(rng: random.Random) -> list[Case]:
    """Every difference from numbers up to 20."""
    return [
        single(f"What is {x} minus {y}?", f"{x} minus {y} is {x - y}.")
        for x in range(LARGEST + 1)
        for y in range(x + 1)
    ]


def wordy_sum_cases(rng: random.Random) -> list[Case]:
    """Sums in all wordings, and told as stories."""
    makers = (addition, subtraction, word_problem)
    return [single(*rng.choice(makers)(rng)) for _ in range(90)]


def reading_cases(rng: random.Random, characters: int, count: int) -> list[Case]:
    """One question on a context of about so many characters."""
    cases = []
    for _ in range(count):
        context = Context(rng, characters, rng.choice((0.0, 0.1, 0.3))).fill()
        document = over_context(rng, context, 1)
        asked, answer = document.turns[0]
        messages = [{"role": "user", "content": asked}]
        if document.system is not None:
            messages.insert(0, {"role": "system", "content": document.system})
        cases.append(Case(messages, (answer,)))
    return cases


def story_cases(rng: random.Random) -> list[tuple[Case, Case | None]]:
    """Story requests: whether the name is kept, and where a thing was asked for, whether it is."""
    cases: list[tuple[Case, Case | None]] = []
    for index in range(60):
        name = new_name(rng) if index % 5 == 0 else rng.choice((*GIRLS, *BOYS))
        child = "girl" if name in GIRLS else "boy"
        animal = rng.choice(ANIMALS)
        about, thing = rng.choice((
            (f"a {child} called {name}", None),
            (name, None),
            (f"a {child} named {name} and {with_article(animal)}", animal),
            (f"a lost key and a {child} called {name}", "key"),
        ))  # fmt: skip
        ask = rng.choice(HELD_OUT_ASKS if index % 3 == 0 else ASKS).format(about)
        messages = [{"role": "user", "content": ask}]
        kept = Case(messages, (name,), exact=False)
        cases.append((kept, Case(messages, (thing,), exact=False) if thing else None))
    return cases


def named_story_cases(rng: random.Random) -> list[Case]:
    """Is the name used? A third of the requests are in wordings never trained."""
    return [named for named, _ in story_cases(rng)]


def thing_story_cases(rng: random.Random) -> list[Case]:
    """Does the animal or thing occur?"""
    return [with_thing for _, with_thing in story_cases(rng) if with_thing is not None]


def refusal_cases(rng: random.Random) -> list[Case]:
    """What the model cannot know, it must refuse."""
    return [single(*rng.choice((refusal, unknown_person))(rng)) for _ in range(50)]


MEASURES: dict[str, tuple[Callable[[random.Random], list[Case]], int]] = {
    "village facts, wordings of the training": (world_cases, 40),
    "village facts, lower case, no punctuation": (lower_cases, 40),
    "village facts, wordings never trained": (paraphrase_cases, 40),
    "sums up to 20 (all)": (sum_cases, 16),
    "differences up to 20 (all)": (difference_cases, 16),
    "sums in any wording": (wordy_sum_cases, 40),
    "questions on ~150 tokens of notes": (lambda rng: reading_cases(rng, 600, 80), 48),
    "questions on ~700 tokens of notes": (lambda rng: reading_cases(rng, 3000, 64), 48),
    "questions on ~1,500 tokens of notes": (lambda rng: reading_cases(rng, 6500, 64), 48),
    "stories that use the name asked for": (named_story_cases, 220),
    "stories that use the thing or animal asked for": (thing_story_cases, 220),
    "refusals": (refusal_cases, 40),
}


def main() -> None:
    """Print one line per measure, and some wrong answers if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", type=int, default=0, help="wrong answers to show per measure")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    reader = Reader(arguments.folder)
    for name, (make, max_tokens) in MEASURES.items():
        cases = make(random.Random(SEED))
        answers = reader.answers([case.messages for case in cases], max_tokens)
        wrong = [(c, a) for c, a in zip(cases, answers) if not c.passed(a)]
        right = len(cases) - len(wrong)
        print(f"{name:45s} {right:4d} of {len(cases):3d}  {right / len(cases):6.1%}", flush=True)
        for case, answer in wrong[: arguments.show]:
            print(f"    {case.messages[-1]['content'][-90:]!r}\n      -> {answer!r}"
                  f"\n      expected {case.expected!r}")  # fmt: skip


if __name__ == "__main__":
    main()
