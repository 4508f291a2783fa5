"""Short notes full of made-up facts, with questions on them: what teaches reading a long prompt.

No fact here holds in another text, so the only way to answer is to look it up in the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from grammar import Person, with_article
from words import ADJECTIVES, ANIMALS, COLOURS, FOODS, PLACES, THINGS
from world import DAYS, NUMBERS, RESIDENTS

QA = tuple[tuple[str, ...], str]  # ways to ask, the answer


@dataclass(frozen=True)
class Note:
    """A few sentences and what can be asked about them."""

    text: str
    questions: tuple[QA, ...]


@dataclass
class Supply:
    """Names, things and animals, each handed out once in a document so that questions are clear."""

    rng: random.Random
    people: list[Person]

    def __post_init__(self) -> None:
        self.things = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
        self.rng.shuffle(self.things)
        self.days = self.rng.sample(DAYS, len(DAYS))
        self.foods = self.rng.sample(FOODS, len(FOODS))
        self.elders = self.rng.sample(RESIDENTS, len(RESIDENTS))

    def place(self) -> str:
        return self.rng.choice(list(PLACES))


def profile(supply: Supply) -> Note:
    """A child with age, home and an animal."""
    rng, who = supply.rng, supply.people.pop()
    age, home = NUMBERS[rng.randint(5, 14)], supply.place()
    animal, colour = rng.choice(ANIMALS), rng.choice(COLOURS)
    pet = rng.choice(("Bubbles", "Snow", "Star", "Muffin", "Tiger", "Bean", "Cookie", "Shadow",
                      "Toffee", "Lucky", "Daisy", "Pebble", "Ginger", "Spot", "Honey"))  # fmt: skip
    wish = rng.choice(("sailor", "baker", "singer", "painter", "doctor", "teacher", "farmer",
                       "captain", "gardener", "dancer"))  # fmt: skip
    facts = [
        (rng.choice((f"{who} is {age} years old.", f"{who} turned {age} this year.")),
         ((f"How old is {who}?", f"What is the age of {who}?", f"What age is {who}?"),
          f"{who} is {age} years old.")),
        (rng.choice((f"{who} lives near {home}.", f"The house of {who} is near {home}.")),
         ((f"Where does {who} live?", f"Where is the house of {who}?",
           f"Where is {who}'s home?"), f"{who} lives near {home}.")),
        (rng.choice((f"{who} has {with_article(colour + ' ' + animal)} called {pet}.",
                     f"{who}'s pet is {with_article(colour + ' ' + animal)}. It is called {pet}.")),
         ((f"Which pet does {who} have?", f"What animal does {who} have?",
           f"What is {who}'s pet called?", f"Does {who} have a pet?"),
          f"{who} has {with_article(colour + ' ' + animal)} called {pet}.")),
        (rng.choice((f"{who} wants to become a {wish}.", f"One day {who} wants to be a {wish}.")),
         ((f"What does {who} want to become?", f"What does {who} want to be?"),
          f"{who} wants to become a {wish}.")),
    ]  # fmt: skip
    chosen = rng.sample(facts, rng.randint(2, 4))
    lines = [chosen[0][0]]
    for line, _ in chosen[1:]:  # "Rosa is ten years old. She lives near the mill."
        follows = line.startswith(f"{who} ") and rng.random() < 0.6
        lines.append(line.replace(f"{who} ", f"{who.He} ", 1) if follows else line)
    return Note(" ".join(lines), tuple(question for _, question in chosen))


def errand(supply: Supply) -> Note:
    """Somebody buys something somewhere."""
    rng, who, place = supply.rng, supply.people.pop(), supply.place()
    food, count = rng.choice(FOODS), NUMBERS[rng.randint(2, 20)]
    price = NUMBERS[rng.randint(1, 20)]
    text = (
        f"{who} went to {place} and bought {count} {food}. {who.He} paid {price} coins.",
        f"At {place}, {who} bought {count} {food} for {price} coins.",
    )
    return Note(rng.choice(text), (
        ((f"What did {who} buy?", f"How much did {who} buy?"), f"{who} bought {count} {food}."),
        ((f"Where did {who} go?", f"Where did {who} buy the {food}?"), f"{who} went to {place}."),
        ((f"How many coins did {who} pay?", f"What did {who} pay?", f"How much did {who} pay?"),
         f"{who} paid {price} coins."),
    ))  # fmt: skip


def found_thing(supply: Supply) -> Note:
    """Something was found; the question starts from the thing or from the finder."""
    rng, item, place, who = supply.rng, supply.things.pop(), supply.place(), supply.people.pop()
    spot = rng.choice(PLACES[place])
    text = rng.choice((
        f"{who} found {with_article(item)} {spot} at {place}.",
        f"At {place}, {spot}, {who} found {with_article(item)}.",
    ))  # fmt: skip
    return Note(text, (
        ((f"Where was the {item}?", f"Where was the {item} found?",
          f"Where did {who} find the {item}?"),
         f"The {item} was at {place}, {spot}."),
        ((f"Who found the {item}?", f"By whom was the {item} found?"), f"{who} found the {item}."),
        ((f"What did {who} find?", f"Which thing did {who} find?"),
         f"{who} found {with_article(item)}."),
    ))  # fmt: skip


def kept_thing(supply: Supply) -> Note:
    """Something is kept in a box, with a number on it."""
    rng, item, who = supply.rng, supply.things.pop(), supply.people.pop()
    number = rng.randint(10, 99)
    return Note(f"Box {number} belongs to {who}. In it there is {with_article(item)}.", (
        ((f"Whose box is number {number}?", f"Who owns box {number}?",
          f"To whom does box {number} belong?"),
         f"Box {number} belongs to {who}."),
        ((f"What is in box {number}?", f"What does box {number} hold?"),
         f"There is {with_article(item)} in box {number}."),
        ((f"Which box does {who} have?", f"What is the number of {who}'s box?"),
         f"{who} has box {number}."),
    ))  # fmt: skip


def diary(supply: Supply) -> Note:
    """What happened on a day of the week."""
    rng = supply.rng
    if not supply.days:
        return errand(supply)
    day, who, place = supply.days.pop(), supply.people.pop(), supply.place()
    deed = rng.choice((
        "painted a fence", "flew a kite", "picked flowers", "read a book", "played the flute",
        "swam in the lake", "helped the farmer", "baked a cake", "mended a net", "saw a rainbow",
        "met a friend", "built a tower of stones", "caught a fish", "climbed a tree",
    ))  # fmt: skip
    text = rng.choice((
        f"On {day}, {who} {deed} at {place}.", f"{day}: {who} went to {place} and {deed}.",
    ))  # fmt: skip
    return Note(text, (
        ((f"What happened on {day}?", f"What did {who} do?", f"What did {who} do on {day}?"),
         f"On {day}, {who} {deed} at {place}."),
        ((f"Where was {who} on {day}?", f"Where was {who}?"), f"{who} was at {place} on {day}."),
        ((f"When was {who} at {place}?", f"On which day was {who} at {place}?"),
         f"{who} was at {place} on {day}."),
    ))  # fmt: skip


def price(supply: Supply) -> Note:
    """What something costs today, and who sells it."""
    rng = supply.rng
    if not supply.foods or not supply.elders:
        return found_thing(supply)
    food, seller, coins = supply.foods.pop(), supply.elders.pop().name, NUMBERS[rng.randint(2, 20)]
    text = rng.choice((
        f"{seller} sells {food} for {coins} coins.",
        f"Today {food} cost {coins} coins. {seller} sells them.",
    ))  # fmt: skip
    return Note(text, (
        ((f"What do {food} cost?", f"How much do the {food} cost?",
          f"What is the price of {food}?"),
         f"The {food} cost {coins} coins."),
        ((f"Who sells {food}?", f"From whom can I buy {food}?"), f"{seller} sells {food}."),
        ((f"What does {seller} sell?", f"What can I buy from {seller}?"),
         f"{seller} sells {food}."),
    ))  # fmt: skip


def favourites(supply: Supply) -> Note:
    """What two children like, and what one of them is like."""
    rng, who = supply.rng, supply.people.pop()
    food, colour, kind = rng.choice(FOODS), rng.choice(COLOURS), rng.choice(ADJECTIVES)
    friend = supply.people.pop()
    text = rng.choice((
        f"{who} likes {food} and the colour {colour}. {who.His} best friend is {friend}.",
        f"{who} is a {kind} {who.child} whose best friend is {friend}. "
        f"{who.He} likes {food} and the colour {colour}.",
    ))  # fmt: skip
    return Note(text, (
        ((f"Who is {who}'s best friend?", f"Who is the best friend of {who}?"),
         f"{who}'s best friend is {friend}."),
        ((f"What does {who} like?", f"What does {who} like to eat?"), f"{who} likes {food}."),
        ((f"What is {who}'s favourite colour?", f"Which colour does {who} like?"),
         f"{who} likes the colour {colour}."),
    ))  # fmt: skip


MAKERS: tuple[Callable[[Supply], Note], ...] = (
    profile, profile, errand, found_thing, kept_thing, diary, price, favourites,
)  # fmt: skip


def note(supply: Supply) -> Note:
    """One note of any kind."""
    return supply.rng.choice(MAKERS)(supply)
