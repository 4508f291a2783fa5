"""The generator behind the demo model: what it teaches must be true, and the same every time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.models.training_scripts import run

# Runs beside the generator's modules, which are plain scripts, and prints what it saw.
PROBE = """
import json, random, sys
from corpus import encode, pack, train_tokenizer
from documents import long_document, short_document
from more_plots import PLOTS
from questions import VILLAGE_FACTS, WORLD_FACTS
from stories import request, tell
from talk import small_sum

rng = random.Random(int(sys.argv[1]))
stories = []
for plot in PLOTS:
    story = tell(rng, plot=plot)
    stories.append({"text": story.text, "hero": story.hero.name, "ask": request(rng, story),
                    "mentions": story.mentions, "plot": plot.name})
tokenizer = train_tokenizer(1, 1024, num_documents=400)
rows = pack(tokenizer, short_document, 3, 6, 256)
long = long_document(rng)
print(json.dumps({
    "stories": stories,
    "short": [short_document(rng).segments() for _ in range(40)],
    "long": long.segments(),
    "ids": encode(tokenizer, [long])[0],
    "decoded": tokenizer.decode(encode(tokenizer, [long])[0][0], skip_special_tokens=False),
    "sums": [small_sum(rng) for _ in range(300)],
    "vocab": tokenizer.get_vocab_size(),
    "rows": [rows.ids.tolist(), rows.counted.tolist()],
    "held_out": [fact.held_out for fact in WORLD_FACTS],
    "trained": [way for fact in WORLD_FACTS + VILLAGE_FACTS for way in fact.wordings],
}))
"""


def probe(seed: int) -> dict[str, Any]:
    """What the generator makes of a seed, seen from its own folder."""
    seen: dict[str, Any] = json.loads(run(PROBE, str(seed)))
    return seen


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return probe(5)


def test_same_seed_makes_the_same_corpus_and_another_seed_another(seen: dict[str, Any]) -> None:
    assert probe(5) == seen
    assert probe(6)["short"] != seen["short"]


def test_there_are_at_least_fifteen_plots_and_no_story_leaves_a_slot_open(
    seen: dict[str, Any],
) -> None:
    assert len({story["plot"] for story in seen["stories"]}) >= 15
    for story in seen["stories"]:
        assert story["hero"] in story["text"]
        assert not set("{}") & set(story["text"])


def test_a_request_mentions_only_what_the_story_has(seen: dict[str, Any]) -> None:
    for story in seen["stories"]:
        for mention in story["mentions"]:
            bare = mention.removeprefix("a ").removeprefix("an ")
            assert bare.split()[-1] in story["text"], (mention, story["text"])


def test_every_taught_sum_is_right(seen: dict[str, Any]) -> None:
    for _, answer in seen["sums"]:
        left, sign, right, _, result = answer.split(",")[0].rstrip(".").split()
        expected = int(left) + int(right) if sign == "plus" else int(left) - int(right)
        assert int(result) == expected
        assert 0 <= expected <= 20


def test_only_answers_count_in_the_loss(seen: dict[str, Any]) -> None:
    for segments in [*seen["short"], seen["long"]]:
        for text, counted in segments:
            assert counted is not text.startswith("<|")
            assert text.endswith("<|end|>") or not counted


def test_wordings_kept_for_the_evaluation_are_never_trained(seen: dict[str, Any]) -> None:
    held_out = {text for text in seen["held_out"] if text is not None}
    assert len(held_out) > 100
    assert not held_out & set(seen["trained"])


def test_encoding_a_document_piece_by_piece_loses_nothing(seen: dict[str, Any]) -> None:
    assert seen["vocab"] == 1024
    assert seen["decoded"] == "".join(text for text, _ in seen["long"])
    ids, counted = seen["ids"]
    assert len(ids) == len(counted)


def test_packed_rows_begin_with_a_document_and_count_no_padding(seen: dict[str, Any]) -> None:
    rows, counted = seen["rows"]
    bos_id, pad_id = 0, 5
    for ids, counts in zip(rows, counted):
        assert len(ids) == 257
        assert ids[0] == bos_id
        assert any(counts)
        assert not any(count for token, count in zip(ids, counts) if token == pad_id)
