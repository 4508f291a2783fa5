"""Whole conversations: what a document of the corpus is, and how often each kind occurs.

A short document fits into 512 tokens; a long one begins with a context of notes and stories that
fills most of 2,048 tokens and then asks many questions on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from grammar import casual, children
from notes import Note, Supply, note
from questions import general_question, interview, world_question
from stories import Story, request, tell
from talk import copying, introduction, odd_question, refusal, small_sum, small_talk, unknown_person

Turn = tuple[str, str]
SYSTEM_PROMPTS = (
    "You are a helpful guide to the village of Willowmere.", "You are a friendly assistant.",
    "You tell stories to children.", "Answer in one or two sentences.", "Be kind and brief.",
    "You are a helpful assistant.", "You answer questions about Willowmere.",
    "You are the voice of a small village. Be polite.",
)  # fmt: skip
HEADINGS = (
    "Here are some notes about the village.", "These are notes from Willowmere.",
    "Read these notes and answer the question.", "Notes from the village:", "",
    "Please read this first.", "The following is known:", "Here is the village newspaper.",
    "Use these notes to answer.", "Here are notes and stories about the village of Willowmere.",
)  # fmt: skip


@dataclass(frozen=True)
class Document:
    """A conversation: an optional system prompt and turns of user and assistant."""

    turns: list[Turn]
    system: str | None = None

    def segments(self) -> list[tuple[str, bool]]:
        """The text in pieces as the chat template renders it; True marks what is predicted."""
        pieces = [("<|bos|>", False)]
        if self.system is not None:
            pieces.append((f"<|system|>{self.system}<|end|>", False))
        for asked, answered in self.turns:
            pieces.append((f"<|user|>{asked}<|end|><|assistant|>", False))
            pieces.append((f"{answered}<|end|>", True))
        return pieces


@dataclass
class Context:
    """Notes and stories that questions can be asked about, all on different people."""

    rng: random.Random
    num_characters: int  # about how long the text shall become
    story_share: float
    parts: list[str] = field(default_factory=list)
    asks: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def fill(self) -> Context:
        """Write parts until the length is reached."""
        people = children(self.rng, 8 + self.num_characters // 45)
        self.names = [who.name for who in people]
        supply = Supply(self.rng, people)
        length = 0
        while length < self.num_characters and len(people) > 4:
            if self.rng.random() < self.story_share:
                self._add_story(tell(self.rng, (people.pop(), people.pop())))
            else:
                self._add_note(note(supply))
            length += len(self.parts[-1])
        return self

    def _add_note(self, one: Note) -> None:
        self.parts.append(one.text)
        self.asks.extend(one.questions)

    def _add_story(self, story: Story) -> None:
        self.parts.append(story.text)
        hero = story.hero.name
        for asked, answer in story.questions:
            clear = asked if hero in asked else f"In the story of {hero}: {asked}"
            self.asks.append(((clear,), answer))
        what = (f"What happened to {hero}?", f"What is the story of {hero} about?",
                f"Tell me what happened to {hero}.")  # fmt: skip
        self.asks.append((what, story.summary))

    def text(self) -> str:
        """The whole context under a heading."""
        rng = self.rng
        style = rng.random()
        if style < 0.4:
            body = "\n\n".join(self.parts)
        elif style < 0.6:
            body = "\n".join(self.parts)
        elif style < 0.8:
            body = "\n".join(f"- {part}" for part in self.parts)
        else:
            body = " ".join(self.parts)
        heading = rng.choice(HEADINGS)
        return f"{heading}\n\n{body}" if heading else body

    def questions(self, count: int) -> list[Turn]:
        """Different questions on the context, each in one of its wordings."""
        chosen = self.rng.sample(self.asks, min(count, len(self.asks)))
        return [(casual(self.rng, self.rng.choice(ways), self.names), answer)
                for ways, answer in chosen]  # fmt: skip


def over_context(rng: random.Random, context: Context, count: int) -> Document:
    """Questions on a context, which stands in the first message or in the system prompt."""
    turns = context.questions(count)
    text = context.text()
    if rng.random() < 0.25:
        return Document(turns, system=text)
    (asked, answer), *later = turns
    if rng.random() < 0.1:
        first = f"{asked}\n\n{text}"
    else:
        lead = rng.choice(("", "", "", "Question: ", "My question: ", "Now tell me: "))
        first = f"{text}\n\n{lead}{asked}"
    return Document([(first, answer), *later], system=system_prompt(rng, 0.2))


def system_prompt(rng: random.Random, share: float = 0.12) -> str | None:
    """Now and then a system prompt."""
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < share else None


def story_talk(rng: random.Random) -> Document:
    """A story on request, sometimes with questions on it."""
    story = tell(rng)
    turns = [(request(rng, story), story.text)]
    if rng.random() < 0.2:
        turns.insert(0, small_talk(rng))
    if rng.random() < 0.3:
        turns += rng.sample(list(story.questions), rng.randint(1, 2))
    elif rng.random() < 0.1:
        turns.append((rng.choice(("Say that in one sentence.", "Summarise the story.",
                                  "What was the story about?")), story.summary))  # fmt: skip
    return Document(turns, system_prompt(rng))


def village_talk(rng: random.Random) -> Document:
    """Questions on the village."""
    if rng.random() < 0.25:
        return Document(interview(rng), system_prompt(rng))
    turns = [world_question(rng) for _ in range(rng.choice((1, 2, 3, 4)))]
    if rng.random() < 0.15:
        turns.insert(0, small_talk(rng))
    return Document(turns, system_prompt(rng))


def mixed_talk(rng: random.Random) -> Document:
    """Everyday questions, small talk and refusals, in any order."""
    makers: tuple[Callable[[random.Random], Turn], ...] = (
        general_question, general_question, odd_question, odd_question, small_talk, refusal,
        unknown_person, world_question,
    )  # fmt: skip
    return Document([rng.choice(makers)(rng) for _ in range(rng.randint(1, 5))], system_prompt(rng))


def sum_talk(rng: random.Random) -> Document:
    """Arithmetic."""
    return Document([small_sum(rng) for _ in range(rng.randint(1, 5))], system_prompt(rng, 0.05))


def copy_talk(rng: random.Random) -> Document:
    """Copying and remembering a name."""
    if rng.random() < 0.35:
        return Document(introduction(rng), system_prompt(rng))
    return Document([copying(rng) for _ in range(rng.randint(1, 3))])


def reading_talk(rng: random.Random) -> Document:
    """Questions on a few notes or a story."""
    context = Context(rng, rng.randint(60, 900), rng.choice((0.0, 0.0, 0.3, 0.6))).fill()
    return over_context(rng, context, rng.randint(2, 9))


def glance_talk(rng: random.Random) -> Document:
    """Questions on one or two notes."""
    context = Context(rng, rng.randint(20, 160), 0.0).fill()
    return over_context(rng, context, rng.randint(2, 5))


def passage_talk(rng: random.Random) -> Document:
    """Questions on two to six notes."""
    context = Context(rng, rng.randint(80, 450), 0.0).fill()
    return over_context(rng, context, rng.randint(4, 8))


SHORT_KINDS: tuple[tuple[float, Callable[[random.Random], Document]], ...] = (
    (0.29, story_talk), (0.20, village_talk), (0.10, mixed_talk), (0.12, sum_talk),
    (0.08, copy_talk), (0.21, reading_talk),
)  # fmt: skip


# What comes first: copying and looking up in two or three sentences. Learned here in some hundred
# steps; from long documents alone it does not come, since among so many words none stands out.
LESSON_KINDS: tuple[tuple[float, Callable[[random.Random], Document]], ...] = (
    (0.34, copy_talk), (0.34, glance_talk), (0.16, village_talk), (0.10, sum_talk),
    (0.06, mixed_talk),
)  # fmt: skip


def lesson_document(rng: random.Random) -> Document:
    """A document of the first lessons."""
    weights = [share for share, _ in LESSON_KINDS]
    return rng.choices([make for _, make in LESSON_KINDS], weights)[0](rng)


# The same in a paragraph or two, among the other kinds.
STUDY_KINDS: tuple[tuple[float, Callable[[random.Random], Document]], ...] = (
    (0.58, passage_talk), (0.10, copy_talk), (0.12, village_talk), (0.08, sum_talk),
    (0.06, mixed_talk), (0.06, story_talk),
)  # fmt: skip


def study_document(rng: random.Random) -> Document:
    """A document that is mostly about reading."""
    weights = [share for share, _ in STUDY_KINDS]
    return rng.choices([make for _, make in STUDY_KINDS], weights)[0](rng)


def short_document(rng: random.Random) -> Document:
    """A document of any short kind."""
    weights = [share for share, _ in SHORT_KINDS]
    return rng.choices([make for _, make in SHORT_KINDS], weights)[0](rng)


def long_document(rng: random.Random) -> Document:
    """Many questions on a long context, and sometimes something quite different after it."""
    size = rng.choice((1500, 2500, 3500, 4500, 5500, 6500))
    context = Context(rng, size + rng.randint(-500, 500), rng.choice((0.0, 0.1, 0.2, 0.4, 0.7)))
    document = over_context(rng, context.fill(), rng.randint(8, 20))
    if rng.random() < 0.2:
        story = tell(rng)
        document.turns.append((request(rng, story), story.text))
    if rng.random() < 0.3:
        document.turns.append(world_question(rng))
    return document
