"""Sums, counting, small talk, everyday knowledge, copying, and polite refusals."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from grammar import Person, capital, casual, children, listed, new_name, with_article
from words import ANIMALS, BOYS, COLOURS, FOODS, GIRLS, PLACES, THINGS
from world import DAYS, MIXTURES, MONTHS, NUMBERS, OPPOSITES, RESIDENTS, SIZES, SOUNDS

Turn = tuple[str, str]  # what the user says, what the model answers
LARGEST = 20


def number(rng: random.Random, value: int, words: float = 0.35) -> str:
    """A number as digits or as a word."""
    return NUMBERS[value] if rng.random() < words else str(value)


def addition(rng: random.Random) -> Turn:
    """A sum up to 20."""
    total = rng.randint(0, LARGEST)
    left = rng.randint(0, total)
    x, y = number(rng, left), number(rng, total - left)
    ask = rng.choice((
        f"What is {x} plus {y}?", f"What is {x} + {y}?", f"How much is {x} and {y}?",
        f"How much is {x} plus {y}?", f"{x} + {y}", f"{left}+{total - left}=?", f"Add {x} and {y}.",
        f"Can you add {x} and {y}?", f"{x} plus {y}",
    ))  # fmt: skip
    return casual(rng, ask), f"{left} plus {total - left} is {total}."


def subtraction(rng: random.Random) -> Turn:
    """A difference, from at most 20."""
    left = rng.randint(0, LARGEST)
    right = rng.randint(0, left)
    x, y = number(rng, left), number(rng, right)
    ask = rng.choice((
        f"What is {x} minus {y}?", f"What is {x} - {y}?", f"How much is {x} minus {y}?",
        f"{x} - {y}", f"{left}-{right}=?", f"Take {y} away from {x}.", f"Subtract {y} from {x}.",
        f"{x} minus {y}",
    ))  # fmt: skip
    return casual(rng, ask), f"{left} minus {right} is {left - right}."


def word_problem(rng: random.Random) -> Turn:
    """A sum told as a little story."""
    who, other = children(rng, 2)
    food = rng.choice(FOODS)
    if rng.random() < 0.5:
        total = rng.randint(3, LARGEST)
        left = rng.randint(1, total - 1)
        ask = (
            f"{who} has {number(rng, left)} {food}. {other} gives {who.him} "
            f"{number(rng, total - left)} more. How many {food} does {who} have now?"
        )
        return ask, f"{left} plus {total - left} is {total}, so {who} has {total} {food}."
    left = rng.randint(2, LARGEST)
    right = rng.randint(1, left - 1)
    verb = rng.choice(("eats", "loses", "gives away", "sells"))
    ask = (f"{who} has {number(rng, left)} {food} and {verb} {number(rng, right)}. "
           f"How many {food} are left?")  # fmt: skip
    return ask, f"{left} minus {right} is {left - right}, so {who} has {left - right} {food} left."


def counting(rng: random.Random) -> Turn:
    """Counting up or down."""
    end = rng.randint(3, LARGEST)
    if rng.random() < 0.7:
        start = rng.choice((1, 1, 1, rng.randint(1, end - 1)))
        asked = f"Count from {start} to {end}." if start > 1 else f"Count to {number(rng, end)}."
        return casual(rng, asked), ", ".join(map(str, range(start, end + 1))) + "."
    end = min(end, 12)
    return casual(rng, f"Count down from {number(rng, end)}."), ", ".join(
        map(str, range(end, -1, -1))
    ) + "."


def calendar(rng: random.Random) -> Turn:
    """The day or month before or after another."""
    names, kind = (DAYS, "day") if rng.random() < 0.6 else (MONTHS, "month")
    index, step = rng.randrange(len(names)), rng.choice((-1, 1))
    word = "after" if step == 1 else "before"
    ask = rng.choice((
        f"What {kind} comes {word} {names[index]}?", f"Which {kind} is {word} {names[index]}?",
    ))  # fmt: skip
    answer = f"The {kind} {word} {names[index]} is {names[(index + step) % len(names)]}."
    return casual(rng, ask, names), answer


def everyday(rng: random.Random) -> Turn:
    """Sounds, opposites, colours, sizes."""
    kind = rng.randrange(4)
    if kind == 0:
        animal = rng.choice(list(SOUNDS))
        ask, answer = (
            f"What sound does {with_article(animal)} make?",
            f"{capital(with_article(animal))} {SOUNDS[animal]}.",
        )
    elif kind == 1:
        pair = rng.choice(OPPOSITES)
        word, opposite = rng.sample(pair, 2)
        ask, answer = f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}."
    elif kind == 2:
        one, two, result = rng.choice(MIXTURES)
        one, two = rng.sample((one, two), 2)
        ask, answer = (
            f"What do you get when you mix {one} and {two}?",
            f"{capital(one)} and {two} make {result}.",
        )
    else:
        small, big = sorted(rng.sample(range(len(SIZES)), 2))
        shown = rng.sample((SIZES[small], SIZES[big]), 2)
        ask = f"Which is bigger, a {shown[0]} or a {shown[1]}?"
        answer = f"A {SIZES[big]} is bigger than a {SIZES[small]}."
    return casual(rng, ask), answer


LISTS: dict[str, Sequence[str]] = {
    "animals": ANIMALS, "colours": COLOURS,
    "fruits": ("apples", "pears", "plums", "cherries", "peaches"),
    "places in Willowmere": tuple(PLACES),
    "people in Willowmere": tuple(who.name for who in RESIDENTS),
    "jobs": tuple(who.job for who in RESIDENTS), "days": DAYS, "things": THINGS,
}  # fmt: skip


def listing(rng: random.Random) -> Turn:
    """Name a few of a kind."""
    kind = rng.choice(list(LISTS))
    count = rng.randint(2, 5)
    asked = rng.choice(("Name {} {}.", "Can you name {} {}?", "Give me {} {}.", "List {} {}."))
    return casual(rng, asked.format(number(rng, count, 0.7), kind)), capital(
        listed(rng.sample(list(LISTS[kind]), count))
    ) + "."


def copying(rng: random.Random) -> Turn:
    """Repeat something exactly: the plainest exercise in looking back."""
    pool = (*ANIMALS, *COLOURS, *THINGS, *GIRLS, *BOYS, *FOODS)
    words = [
        rng.choice(pool) if rng.random() < 0.8 else new_name(rng) for _ in range(rng.randint(2, 12))
    ]
    if rng.random() < 0.5:
        who, other = children(rng, 2)
        animal = with_article(rng.choice(ANIMALS))
        text = f"{who} saw {animal} and {other} at {rng.choice(list(PLACES))}"
    else:
        text = " ".join(words)
    return rng.choice(
        ("Repeat: {}", "Say this again: {}", "Repeat after me: {}", "Please repeat: {}")
    ).format(text), text


CHAT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello!", "Hi!", "Hello", "Hi there!", "Good morning!", "Hey!", "Good evening!", "Good day!",
      "Hello there!"),
     "Hello! Ask me something about Willowmere, or let me tell you a story."),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.",
      "Who am I talking to?",
      "Hello, who are you?", "Introduce yourself.", "Hi, who are you?"),
     "I am a very small language model. I know the village of Willowmere and I like to tell "
     "stories."),
    (("How are you?", "How do you do?", "How are you today?", "Are you well?"),
     "I am well, thank you. What would you like to know?"),
    (("What can you do?", "Can you help me?", "Help", "What do you know?", "What can I ask you?",
      "How can you help me?"),
     "I can tell short stories, answer questions about Willowmere, read notes and do small sums."),
    (("Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!", "That was nice.", "Great!"),
     "You are welcome! Ask me again any time."),
    (("Goodbye!", "Bye!", "See you tomorrow.", "Good night!", "Bye bye"),
     "Goodbye! Come back to Willowmere soon."),
    (("Where do you live?", "Where are you?", "Where do you come from?"),
     "I live in a computer, but I know every street in Willowmere."),
    (("Are you a human?", "Are you a robot?", "Are you alive?", "Are you real?",
      "Are you a person?"),
     "No, I am not a human. I am a small computer program."),
    (("How old are you?", "When were you made?", "When is your birthday?"),
     "I am very young. I was trained only a short time ago."),
    (("How were you trained?", "How big are you?", "Who made you?",
      "How many parameters do you have?"),
     "I am tiny: I have three and a half million parameters and was trained on a small computer."),
    (("Do you like stories?", "Do you like me?", "Are you happy?"), "Yes, very much!"),
)  # fmt: skip
FAR_AWAY = (
    "France", "Germany", "England", "Italy", "China", "Japan", "India", "America", "Spain",
    "Russia", "Africa", "Europe", "London", "Paris", "Berlin", "Rome", "Sweden", "Brazil", "Mars",
    "Egypt", "Canada", "Tokyo", "Moscow", "Madrid",
)  # fmt: skip
GOODS = (
    "gold", "oil", "phone", "car", "laptop", "pizza", "football", "film", "guitar", "rocket",
    "plane", "camera", "shirt", "bicycle", "radio",
)  # fmt: skip
SUBJECTS = (
    "life", "physics", "gravity", "evolution", "relativity", "mathematics", "democracy", "music",
    "economics", "chemistry", "biology", "energy", "art", "politics", "philosophy", "electricity",
    "money", "history",
)  # fmt: skip
STRANGERS = (
    "Einstein",
    "Napoleon",
    "Mozart",
    "Shakespeare",
    "Newton",
    "Caesar",
    "Cleopatra",
    "Darwin",
)
REFUSAL = "I am sorry, I do not know that. I only know the village of Willowmere."


def refusal(rng: random.Random) -> Turn:
    """Something the model cannot know."""
    far, goods, subject = rng.choice(FAR_AWAY), rng.choice(GOODS), rng.choice(SUBJECTS)
    ask = rng.choice((
        f"What is the capital of {far}?", f"Who is the president of {far}?", f"Where is {far}?",
        f"What is the population of {far}?", f"Tell me about {far}.",
        f"What is the weather in {far}?",
        f"How much does a {goods} cost?", f"What is the best {goods}?", f"How does a {goods} work?",
        f"How do I buy a {goods}?", f"Explain {subject}.", f"What is {subject}?",
        f"Tell me about {subject}.",
        f"Write an essay about {subject}.", f"Write a program about {subject}.",
        f"What is the history of {far}?",
        f"Who was {rng.choice(STRANGERS)}?", f"What is the theory of {subject}?",
        f"Explain the meaning of {subject}.",
        f"How do I write a program in {rng.choice(('Python', 'Java', 'C'))}?",
        "What is today's date?",
        "What time is it?", "What is the weather today?", "Who won the football game?",
        "What is the news?",
    ))  # fmt: skip
    return casual(rng, ask), REFUSAL


def unknown_person(rng: random.Random) -> Turn:
    """A question on somebody who does not live in the village."""
    who = new_name(rng) if rng.random() < 0.6 else rng.choice((*GIRLS, *BOYS))
    if any(who == one.name for one in RESIDENTS):
        return refusal(rng)
    ask = rng.choice(
        (
            f"Who is {who}?",
            f"What does {who} do?",
            f"Where does {who} work?",
            f"What is {who}'s job?",
        )
    )
    return casual(rng, ask, (who,)), f"I am sorry, I do not know {who}."


def small_talk(rng: random.Random) -> Turn:
    """A greeting or a question on the model itself."""
    asks, answer = rng.choice(CHAT)
    return casual(rng, rng.choice(asks)), answer


def introduction(rng: random.Random) -> list[Turn]:
    """The user gives a name and asks for it later."""
    who: Person = children(rng, 1, invented=0.4)[0]
    hello = rng.choice(
        (f"My name is {who}.", f"I am {who}.", f"Hello, I am {who}.", f"Hi, my name is {who}!")
    )
    turns = [(hello, f"Hello, {who}! Nice to meet you. What would you like to know?")]
    if rng.random() < 0.5:
        turns.append(small_sum(rng))
    ask = rng.choice(
        ("What is my name?", "Do you remember my name?", "Who am I?", "What am I called?")
    )
    return [*turns, (casual(rng, ask), f"Your name is {who}.")]


SUMS: tuple[Callable[[random.Random], Turn], ...] = (
    addition, addition, subtraction, subtraction, word_problem,
)  # fmt: skip
ODDS: tuple[Callable[[random.Random], Turn], ...] = (
    counting,
    counting,
    calendar,
    everyday,
    everyday,
    listing,
)


def small_sum(rng: random.Random) -> Turn:
    """Any exercise in arithmetic."""
    return rng.choice(SUMS)(rng)


def odd_question(rng: random.Random) -> Turn:
    """Counting, the calendar, everyday knowledge, lists."""
    return rng.choice(ODDS)(rng)
