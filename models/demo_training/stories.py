"""Fill a plot with a cast and join its beats into a story; make the requests that ask for it."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

from grammar import Noun, Person, capital, casual, children, with_article
from more_plots import PLOTS
from plots import Plot
from words import ADJECTIVES, ANIMALS, COLOURS, FOODS, PLACES, THINGS, TIMES, WEATHER
from world import NUMBERS, RESIDENTS

OPENINGS = (
    "There was once {adjective.a} {hero.child} called {hero}.",
    "Once upon a time there was {adjective.a} {hero.child} named {hero}.",
    "In the village of Willowmere lived {adjective.a} {hero.child} called {hero}.",
    "{hero} was {adjective.a} {hero.child} who lived near {home}.",
    "{hero} lived in Willowmere, not far from {home}, and was {adjective.a} {hero.child}.",
    "Everybody in Willowmere knew {hero}, {adjective.a} {hero.child}.",
    "This is the story of {hero}, {adjective.a} {hero.child} from Willowmere.",
)
# Fit anywhere in the middle of a story.
INTERLUDES = (
    "The bell of Willowmere began to ring.", "Far away a dog barked.",
    "A white boat went by on the lake.", "{passer.title} who was passing by, waved.",
    "A crow watched from a fence.", "Somewhere {passer} was {hobby}.",
    "The smell of {treat} came out of a window.", "A cloud hid the sun for a moment.",
)  # fmt: skip
ENDINGS = {
    "help": ("Friends help each other.", "{hero} was very happy.", "It is good to ask for help.",
             "{hero} never forgot who had helped."),
    "share": ("There is enough when people share.", "Sharing makes everyone happy.",
              "{friend} never forgot it."),
    "truth": ("It is better to tell the truth.", "Telling the truth takes courage.",
              "After that {hero} and {elder} were good friends."),
    "brave": ("Being brave does not mean that you are never afraid.",
              "Small people can do brave things.", "That night {hero} slept very well."),
    "work": ("Good work takes time.", "If you keep trying, you will learn.",
             "{hero} was proud, and rightly so."),
    "kind": ("A kind heart is worth more than gold.", "Kindness comes back to you.",
             "Everyone was happy that evening."),
    "friends": ("A good friend is the best thing in the world.",
                "And they are friends to this day.",
                "Together everything is more fun."),
    "care": ("From that day on, {hero} was more careful.", "{hero} never forgot that day."),
}  # fmt: skip
CLOSINGS = (
    "In the evening everyone got some {treat}.", "And {hero} smiled all the way home.",
    "They still talk about it in Willowmere.", "{hero} told the story again and again.",
)  # fmt: skip
ASKS = (
    "Tell me a story about {}.", "Write a short story about {}.", "Tell a story about {}.",
    "Can you tell me a story about {}?", "Please write a story about {}.",
    "I want to hear a story about {}.", "Tell me a short story about {}.", "A story about {}.",
    "Please tell me something about {} as a story.", "Make up a story about {}.",
    "Could you write a little story about {}?", "I would like a story about {}.",
)  # fmt: skip
HELD_OUT_ASKS = ("Do you have a story about {} for me?", "Let me hear a tale about {}.")
PLAIN_ASKS = (
    "Tell me a story.", "Tell me a short story.", "Please tell me a story.", "Write a story.",
    "Can you tell me a story?", "I would like to hear a story.", "Another story, please.",
)  # fmt: skip


@dataclass(frozen=True)
class Story:
    """A told story, with what can be asked about it and what a request may mention of it."""

    text: str
    questions: tuple[tuple[str, str], ...]
    summary: str
    hero: Person
    adjective: str
    topics: tuple[str, ...]
    mentions: tuple[str, ...]  # what else occurs in the text: "a fox", "the river", a friend


# Slots that a request may mention, and how; places are told from the others by their article.
MENTIONS = {
    "place": "{place}", "other": "{other}", "animal": "{animal.a}", "item": "{item.a}",
    "elder": "{elder.name}", "friend": "{friend.name}",
}  # fmt: skip


def resident(rng: random.Random) -> Person:
    """One of the grown-ups."""
    one = rng.choice(RESIDENTS)
    return Person(one.name, one.female, one.job)


def cast(rng: random.Random, hero: Person, friend: Person) -> dict[str, object]:
    """Everything a template may name."""
    places = list(PLACES)
    place, other, home = rng.sample(places, 3)
    thing = rng.choice(THINGS)
    few = rng.randint(2, 8)
    time = rng.choice(TIMES)
    wintry = "winter" in time
    weather = rng.choice([line for line in WEATHER if wintry or "Snow" not in line])
    elder, passer = rng.sample(RESIDENTS, 2)
    return {
        "hero": hero, "friend": friend, "elder": Person(elder.name, elder.female, elder.job),
        "passer": Person(passer.name, passer.female, passer.job), "hobby": passer.hobby,
        "item": Noun(f"{rng.choice(COLOURS)} {thing}"), "thing": thing,
        "animal": Noun(rng.choice(ANIMALS)), "place": place, "other": other, "home": home,
        "spot": rng.choice(PLACES[place]), "spot_other": rng.choice(PLACES[other]),
        "food": rng.choice(FOODS), "few": NUMBERS[few], "many": NUMBERS[2 * few],
        "time": time, "time_low": time[0].lower() + time[1:] if time[:2] != "On" else "one day",
        "weather": weather, "adjective": Noun(rng.choice(ADJECTIVES)), "treat": elder.food,
        "door": elder.door, "colour": rng.choice(COLOURS),
    }  # fmt: skip


def tidy(text: str) -> str:
    """Set right what joined slots leave behind: a job's comma before another mark."""
    for wrong, right in ((",,", ","), (",.", "."), (",?", "?")):
        text = text.replace(wrong, right)
    return text


def tell(
    rng: random.Random, people: Sequence[Person] | None = None, plot: Plot | None = None
) -> Story:
    """Tell one story; `people` are its hero and the hero's friend."""
    hero, friend = people if people is not None else children(rng, 2)
    plot = plot or rng.choice(PLOTS)
    slots = cast(rng, hero, friend) | rng.choice(plot.choices)
    template = outline(rng, plot)
    while not names_in(plot.summary) <= names_in(template):
        template = outline(rng, plot)
    used = names_in(template)

    def filled(template: str) -> str:
        return tidy(template.format(**slots))

    mentions = [filled(slot) for name, slot in MENTIONS.items() if name in used]
    return Story(
        text=filled(template),
        questions=tuple(
            (filled(ask), filled(answer))
            for ask, answer in plot.questions
            if names_in(ask + answer) <= used
        ),
        summary=filled(plot.summary),
        hero=hero,
        adjective=str(slots["adjective"]),
        topics=tuple(filled(topic) for topic in plot.topics if names_in(topic) <= used),
        mentions=tuple(mentions),
    )


def outline(rng: random.Random, plot: Plot) -> str:
    """The story's template: one alternative of each beat, with an opening and an ending."""
    lines = [rng.choice(beat) for beat in plot.beats]
    if rng.random() < 0.3:
        lines.insert(rng.randint(2, len(lines) - 3), rng.choice(INTERLUDES))
    lines = [rng.choice(OPENINGS), *lines, rng.choice(ENDINGS[plot.ending])]
    if rng.random() < 0.25:
        lines.append(rng.choice(CLOSINGS))
    return " ".join(line for line in lines if line)


def names_in(template: str) -> set[str]:
    """The slots of a template: what a question needs must be in the story, or it has no answer."""
    return {name.split(".")[0] for _, name, _, _ in string.Formatter().parse(template) if name}


def named(rng: random.Random, story: Story) -> str:
    """The hero as a request may put it: "Rosa", "a girl called Rosa", "a brave girl named Rosa"."""
    hero = story.hero
    chance = rng.random()
    if chance < 0.3:
        return hero.name
    if chance < 0.45:
        return f"a child {rng.choice(('called', 'named'))} {hero}"
    described = f"{story.adjective} {hero.child}" if chance < 0.65 else hero.child
    return f"{with_article(described)} {rng.choice(('called', 'named', 'with the name'))} {hero}"


def subject(rng: random.Random, story: Story) -> str:
    """What a request says the story shall be about; all of it occurs in the story."""
    topic = rng.choice(story.topics)
    hero = named(rng, story)
    mention = rng.choice(story.mentions or story.topics)
    chance = rng.random()
    if chance < 0.25:
        return hero
    if chance < 0.4:
        return topic
    if chance < 0.6 and story.hero.name not in topic:
        return f"{topic} and {hero}" if rng.random() < 0.4 else f"{hero} and {topic}"
    if mention.startswith("the "):
        return f"{hero} at {mention}"
    return f"{hero} and {mention}" if rng.random() < 0.8 else mention


def request(rng: random.Random, story: Story) -> str:
    """A request that this story answers."""
    if rng.random() < 0.1:
        return casual(rng, rng.choice(PLAIN_ASKS))
    names = (story.hero.name, *story.mentions)
    asked = capital(rng.choice(ASKS).format(subject(rng, story)))
    return casual(rng, asked, names)
