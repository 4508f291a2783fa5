"""Questions on the fixed world, each in many wordings; some wordings are kept for the evaluation.

Of every list the last wording is never trained on: `evaluate.py` asks it to measure paraphrases.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from grammar import casual, with_article
from world import GENERAL, RESIDENTS, VILLAGE, WORKPLACES, Resident


@dataclass(frozen=True)
class Fact:
    """An answer, the wordings trained on, the wording kept back, and what a follow-up calls it."""

    answer: str
    wordings: tuple[str, ...]
    held_out: str | None = None
    follow_up: str | None = None  # "Where does she work?", after the resident was mentioned


def fact(answer: str, wordings: Sequence[str], follow_up: str | None = None) -> Fact:
    """A fact whose last wording is held out."""
    return Fact(answer, tuple(wordings[:-1]), wordings[-1], follow_up)


def person_facts(who: Resident) -> tuple[Fact, ...]:
    """All that is known about a resident."""
    return *_at_work(who), *_at_home(who), *_the_other_way_round(who)


def _at_work(who: Resident) -> tuple[Fact, ...]:
    name, he = who.name, "she" if who.female else "he"
    return (
        fact(f"{name} is the {who.job} of Willowmere. {he.capitalize()} {who.duty}.", (
            f"Who is {name}?", f"Tell me about {name}.", f"What do you know about {name}?",
            f"Can you tell me who {name} is?", f"Do you know {name}?", f"Who's {name}?",
            f"What is {name}'s job?", f"What does {name} do?", f"What work does {name} do?",
            f"What is the job of {name}?", f"What does {name} do for a living?",
            f"Is {name} the teacher?" if who.job == "teacher" else f"What is {name}?",
            f"Could you say something about {name}?")),
        fact(f"{name} works at the {who.workplace}, {WORKPLACES[who.workplace]}.", (
            f"Where does {name} work?", f"Where can I find {name}?", f"Where is {name}?",
            f"At what place does {name} work?", f"Where should I go to see {name}?",
            f"Can you tell me where {name} works?", f"I am looking for {name}.",
            f"I want to visit {name}. Where do I go?", f"Where would I find {name}?"),
            f"Where does {he} work?"),
    )  # fmt: skip


def _at_home(who: Resident) -> tuple[Fact, ...]:
    name, he, his = who.name, "she" if who.female else "he", "her" if who.female else "his"
    article = with_article(who.pet)
    return (
        fact(f"{name} has {article} called {who.pet_name}.", (
            f"Does {name} have a pet?", f"Which animal does {name} have?",
            f"What is {name}'s pet called?", f"What pet does {name} have?",
            f"Which pet belongs to {name}?", f"What is the name of {name}'s pet?",
            f"What animal lives with {name}?", f"What is {name}'s {who.pet} called?",
            f"Has {name} got a pet?"),
            f"Does {he} have a pet?"),
        fact(f"{name} likes {who.food} best.", (
            f"What does {name} like to eat?", f"What is {name}'s favourite food?",
            f"Which food does {name} like best?", f"What does {name} love to eat?",
            f"What should I cook for {name}?", f"What is the favourite food of {name}?",
            f"What does {name} eat?", f"What food does {name} like most?"),
            f"What does {he} like to eat?"),
        fact(f"{name}'s door is {who.door}.", (
            f"What colour is {name}'s door?", f"What is the colour of {name}'s door?",
            f"Which colour is {name}'s door?", f"What colour does {name}'s door have?",
            f"What colour is the door of {name}?", f"What does {name}'s door look like?",
            f"Do you know the colour of {name}'s door?"),
            f"What colour is {his} door?"),
        fact(f"The {who.door} door belongs to {name}.", (
            f"Whose door is {who.door}?", f"Who lives behind the {who.door} door?",
            f"Who has {with_article(who.door)} door?",
            f"Which person has {with_article(who.door)} door?",
            f"To whom does the {who.door} door belong?")),
        fact(f"{name} likes {who.hobby}.", (
            f"What does {name} like to do?", f"What is {name}'s hobby?",
            f"What does {name} do for fun?", f"What does {name} do after work?",
            f"What does {name} enjoy?", f"What is the hobby of {name}?",
            f"What does {name} do in the evening?", f"How does {name} spend free time?"),
            f"What does {he} like to do?"),
    )  # fmt: skip


def _the_other_way_round(who: Resident) -> tuple[Fact, ...]:
    """Asked by the pet and by the job for whose they are."""
    name, his, him = who.name, "her" if who.female else "his", "her" if who.female else "him"
    return (
        fact(f"{name} is the {who.job}, and {who.pet_name} is {his} {who.pet}.", (
            f"Who is {who.pet_name}?", f"What kind of animal is {who.pet_name}?",
            f"Whose pet is {who.pet_name}?", f"To whom does {who.pet_name} belong?",
            f"Tell me about {who.pet_name}.", f"Who has a pet called {who.pet_name}?",
            f"Who owns {who.pet_name}?"),
            f"Who is {who.pet_name}?"),
        fact(f"You can find {him} at the {who.workplace}, {WORKPLACES[who.workplace]}.", (
            f"Where can I find the {who.job}?", f"Where does the {who.job} work?",
            f"Where is the {who.job}?", f"I am looking for the {who.job}.",
            f"Can you tell me where the {who.job} works?")),
    )  # fmt: skip


def job_facts(who: Resident) -> tuple[Fact, ...]:
    """What is known about a job and its workplace."""
    job, place = who.job, who.workplace
    hobby = f"Who likes {who.hobby}?"
    return (
        fact(f"The {job} of Willowmere is {who.name}.", (
            f"Who is the {job}?", f"Who is the {job} in Willowmere?", f"What is the {job} called?",
            f"What is the name of the {job}?", f"Do you know the {job}?", f"Name the {job}.",
            f"What's the {job}'s name?", f"Who works as the {job}?", f"Who is Willowmere's {job}?",
            f"Tell me the name of the {job}.")),
        fact(f"The {place} is {WORKPLACES[place]}.", (
            f"Where is the {place}?", f"How do I find the {place}?",
            f"Where can I find the {place}?",
            f"How do I get to the {place}?", f"Which way is the {place}?",
            f"Can you show me the way to the {place}?", f"I am looking for the {place}.",
            f"In which place is the {place}?", f"Do you know where the {place} is?")),
        fact(f"{who.name}, the {job}, works at the {place}.", (
            f"Who works at the {place}?", f"Who works in the {place}?",
            f"Who is at the {place}?", f"Whom do I meet at the {place}?",
            f"Which person works at the {place}?")),
        fact(f"{with_article(job).capitalize()} {who.duty}.", (
            f"What does {with_article(job)} do?", f"What is {with_article(job)}?",
            f"What does {with_article(job)} do all day?",
            f"What is the work of {with_article(job)}?",
            f"What does the {job} do?", f"What is the job of {with_article(job)}?")),
        fact(f"{who.name} likes {who.hobby}.", (
            hobby, f"Who enjoys {who.hobby}?", f"Which person likes {who.hobby}?",
            f"Who is fond of {who.hobby}?")),
    )  # fmt: skip


PEOPLE_FACTS = {who.name: person_facts(who) for who in RESIDENTS}
WORLD_FACTS: tuple[Fact, ...] = (
    *(one for facts in PEOPLE_FACTS.values() for one in facts),
    *(one for who in RESIDENTS for one in job_facts(who)),
)
VILLAGE_FACTS = tuple(Fact(answer, wordings) for wordings, answer in VILLAGE)
GENERAL_FACTS = tuple(Fact(answer, wordings) for wordings, answer in GENERAL)
POLITE = (
    "Do you know the answer? {}", "I have a question. {}", "Hello! {}", "Can you help me? {}",
    "Quick question: {}", "I am new here. {}",
)  # fmt: skip


def ask(rng: random.Random, one: Fact) -> tuple[str, str]:
    """A question in one of the trained wordings and its answer."""
    question = rng.choice(one.wordings)
    if rng.random() < 0.08:
        return rng.choice(POLITE).format(question), one.answer
    return casual(rng, question), one.answer


def world_question(rng: random.Random) -> tuple[str, str]:
    """A question on the village."""
    return ask(rng, rng.choice(WORLD_FACTS if rng.random() < 0.87 else VILLAGE_FACTS))


def general_question(rng: random.Random) -> tuple[str, str]:
    """A question on the rest of the world."""
    return ask(rng, rng.choice(GENERAL_FACTS))


def interview(rng: random.Random) -> list[tuple[str, str]]:
    """Several questions on one resident, where the later ones say "he" or "she"."""
    facts = rng.choice(list(PEOPLE_FACTS.values()))
    first, *rest = facts
    turns = [ask(rng, first if rng.random() < 0.7 else rng.choice(rest[:2]))]
    later = rng.sample([one for one in rest if one.follow_up is not None], rng.randint(1, 3))
    turns += [(casual(rng, one.follow_up or ""), one.answer) for one in later]
    return turns
