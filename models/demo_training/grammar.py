"""Small English grammar: articles, pronouns, lists, and the many ways people type a question."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from words import BOYS, GIRLS, NAME_ENDS, NAME_STARTS

Item = TypeVar("Item")


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[0].upper() + text[1:]


def with_article(noun: str) -> str:
    """The noun after "a" or "an"."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def listed(words: Sequence[str]) -> str:
    """Words joined as English does: "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


@dataclass(frozen=True)
class Noun:
    """A noun in a template: {item} "red kite", {item.a} "a red kite", {item.A} "A red kite"."""

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def a(self) -> str:
        return with_article(self.text)

    @property
    def A(self) -> str:  # noqa: N802 - a template's capital letter
        return capital(self.a)


@dataclass(frozen=True)
class Person:
    """Somebody in a template: {hero}, {hero.he}, {hero.His}, {hero.title} "Mira, the baker"."""

    name: str
    female: bool
    job: str | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def he(self) -> str:
        return "she" if self.female else "he"

    @property
    def him(self) -> str:
        return "her" if self.female else "him"

    @property
    def his(self) -> str:
        return "her" if self.female else "his"

    @property
    def He(self) -> str:  # noqa: N802 - a template's capital letter
        return capital(self.he)

    @property
    def His(self) -> str:  # noqa: N802 - a template's capital letter
        return capital(self.his)

    @property
    def child(self) -> str:
        return "girl" if self.female else "boy"

    @property
    def title(self) -> str:
        return f"{self.name}, the {self.job}," if self.job else self.name


def new_name(rng: random.Random) -> str:
    """A name nobody has, such as "Zomir"."""
    return rng.choice(NAME_STARTS) + rng.choice(NAME_ENDS)


def children(rng: random.Random, count: int, invented: float = 0.12) -> list[Person]:
    """Different children; a share of them has invented names."""
    found: dict[str, Person] = {}
    while len(found) < count:
        female = rng.random() < 0.5
        known = rng.choice(GIRLS if female else BOYS)
        name = new_name(rng) if rng.random() < invented else known
        found.setdefault(name, Person(name, female))
    return list(found.values())


def casual(rng: random.Random, text: str, names: Sequence[str] = ()) -> str:
    """The text as somebody might type it: politely, in lower case, without its last mark.

    `names` are never put into lower case, because an answer must be able to repeat them.
    """
    chance = rng.random()
    if chance < 0.55:
        return text
    if chance < 0.63:
        return rng.choice(("Please tell me: ", "Tell me, ", "Hey, ", "Say, ", "Excuse me, ")) + (
            text if text.split()[0] in (*names, "I") else text[0].lower() + text[1:]
        )
    if chance < 0.75:
        return text.rstrip("?.!")
    if chance < 0.80:
        return text.rstrip("?.!") + rng.choice((", please?", " please", "??", " ?"))
    if any(name in text for name in names):
        return text[0].lower() + text[1:] if text.split()[0] not in names else text
    lower = text.lower()
    return lower.rstrip("?.!") if chance < 0.9 else lower
