"""How a router comes by the texts of its cohorts: what it reads, keeps and forgets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from router import texts as texts_module
from router.cohort_texts import OWN, CohortTexts, TextSource
from router.stopped_pools import PoolReport
from router.text import TextModel
from router.texts import Texts
from tests.router.deployment import PROMPT, byte_model, deployment
from tests.router.test_cohort_streams import EVEN, add, die
from tests.router.test_cohort_texts import SHIFTS, ids_of, tell


async def test_texts_of_equal_files_are_one_wherever_they_are(
    text_model: TextModel, tmp_path: Path
) -> None:
    byte_model(tmp_path)
    async with deployment(text_model, prefill=0, decode=0) as d:
        await tell(d, tmp_path, **EVEN)
        texts = d.router.fleet.texts
        await d.until(lambda: texts.of("new") is not None)
        assert texts.of("new") == texts.of("old") == OWN
        assert texts.is_only(OWN)


async def test_texts_of_equal_files_that_are_read_at_once_are_one(
    text_model: TextModel, tmp_path: Path
) -> None:
    of_cohorts = CohortTexts()
    texts = Texts(text_model, None, of_cohorts, lambda: None, keep_s=1.0)
    pools = []
    for cohort in ("one", "two"):
        (tmp_path / cohort).mkdir()
        byte_model(tmp_path / cohort, SHIFTS["new"])
        source = TextSource(str(tmp_path / cohort))
        pools.append(PoolReport(f"d-{cohort}", True, True, 1, cohort=cohort, text=source))
    texts.update(pools, ())
    await asyncio.gather(*texts._reading.values())
    assert of_cohorts.of("one") == of_cohorts.of("two") != OWN
    await texts.close()


@pytest.mark.parametrize("file", ["tokenizer.json", "config.json", "generation_config.json"])
def test_a_file_that_says_something_else_makes_another_text(
    text_model: TextModel, tmp_path: Path, file: str
) -> None:
    byte_model(tmp_path, shift=1 if file == "tokenizer.json" else 0)
    if file == "config.json":
        (tmp_path / file).write_text('{"vocab_size": 257, "eos_token_id": 10}')
    if file == "generation_config.json":
        (tmp_path / file).write_text('{"temperature": 0.5}')
    other = TextModel.load(tmp_path, known=[text_model])
    assert other is not text_model
    assert (other.vocabulary == text_model.vocabulary) is (file != "tokenizer.json")


async def test_the_model_of_the_router_s_own_file_is_not_read_again(
    text_model: TextModel, tmp_path: Path
) -> None:
    """Whatever tokenizer its pools' older files name."""
    async with deployment(text_model, prefill=0, decode=0) as d:
        fleet = d.router.fleet
        source = TextSource(str(tmp_path / "nothing"))
        texts = Texts(text_model, source, fleet.texts, lambda: None, keep_s=1.0)
        d.router.texts = texts
        await tell(d, tmp_path / "nothing", **EVEN)
        assert fleet.texts.of("new") == OWN
        assert not texts._reading


async def test_no_more_than_so_many_requests_wait_for_a_text_that_is_being_read(
    text_model: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts_module, "MAX_SETTLING", 2)
    byte_model(tmp_path, SHIFTS["new"])
    texts = Texts(text_model, None, CohortTexts(), lambda: None, keep_s=1.0)
    source = TextSource(str(tmp_path))
    texts.update([PoolReport("d-new", True, True, 1, cohort="new", text=source)], ())
    waiting = [asyncio.create_task(texts.settled(lambda _: True)) for _ in range(3)]
    over, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert (len(over), len(left)) == (1, 2), "it goes on with what is read"
    await asyncio.gather(*waiting)
    await texts.close()


# --- forgetting -----------------------------------------------------------------------------------


async def test_a_cohort_that_has_gone_is_forgotten_with_its_text_that_cannot_be_read(
    text_model: TextModel, tmp_path: Path
) -> None:
    async with deployment(text_model, prefill=0, decode=0) as d:
        texts = d.router.fleet.texts
        await tell(d, tmp_path / "nothing", **EVEN)
        await add(d, "new", "d0")
        await d.connected(1)
        await tell(d, None, old=1)
        assert texts.unread == ["new"], "a worker is left of it"
        await die(d, "new-d0")
        await d.until(lambda: texts.is_only(OWN))
        assert not d.router.texts._sources


async def test_a_text_that_no_cohort_has_any_more_goes_and_may_come_back(
    text_model: TextModel, tmp_path: Path
) -> None:
    byte_model(tmp_path, SHIFTS["new"])
    of_cohorts = CohortTexts()
    texts = Texts(text_model, None, of_cohorts, lambda: None, keep_s=0.0)
    new = PoolReport("d-new", True, True, 1, cohort="new", text=TextSource(str(tmp_path)))
    old = PoolReport("d-old", True, True, 1, cohort="old")
    for _ in range(2):
        texts.update([old, new], ())
        while (text := of_cohorts.of("new")) is None:
            await asyncio.sleep(0.005)  # the registry speaks about once a second
            texts.update([old, new], ())
        assert texts[text].encode(PROMPT) == ids_of(PROMPT, "new")
        texts.update([], ())
        assert of_cohorts.of("new") == text, "a registry that has just started says nothing"
        texts.update([old], ())
        with pytest.raises(KeyError):
            texts[text]
    assert texts[OWN] is text_model
    await texts.close()
