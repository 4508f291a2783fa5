"""Incremental detokenization: equal to decoding the whole, however the tokens arrive."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from router.text import Detokenizer, TextModel
from router.text.reasoning import ReasoningSplitter
from tests.router.text_fixtures import (
    byte_level_tokenizer,
    load_text,
    sentencepiece_tokenizer,
    write_model,
)

KINDS = ["byte-level", "legacy", "always", "never", "wordpiece"]


def wordpiece_tokenizer() -> Tokenizer:
    """A decoder that is no concatenation of its tokens: "##s" joins, others get a space."""
    vocab = {"<s>": 0, "</s>": 1, "fox": 2, "##es": 3, "river": 4, "##s": 5, "<unk>": 6}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="module")
def text_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[TextModel, Tokenizer]]:
    root: Path = tmp_path_factory.mktemp("models")
    tokenizers = {
        "byte-level": byte_level_tokenizer(),
        "wordpiece": wordpiece_tokenizer(),
        **{kind: sentencepiece_tokenizer(kind) for kind in ("legacy", "always", "never")},
    }
    return {
        kind: (load_text(write_model(root / kind, tokenizer)), tokenizer)
        for kind, tokenizer in tokenizers.items()
    }


def pieces(model: TextModel, ids: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    """What comes out token by token, and at the end."""
    detokenizer = Detokenizer(model.new_decoder(), stop)
    texts = []
    for token_id in ids:
        emitted = detokenizer.push(token_id)
        texts.append(emitted.text)
        if emitted.stop is not None:
            return texts
    return [*texts, detokenizer.finish()]


@pytest.mark.parametrize("kind", ["byte-level", "legacy", "always", "never"])
@given(text=st.text(max_size=60))
@settings(deadline=None)
def test_pieces_of_any_unicode_text_add_up_to_the_tokenizers_own_decoding(
    text_models: dict[str, tuple[TextModel, Tokenizer]], kind: str, text: str
) -> None:
    model, tokenizer = text_models[kind]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    texts = pieces(model, ids)
    assert "".join(texts) == whole
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in texts)
    assert model.decode(ids) == whole


@pytest.mark.parametrize("kind", ["byte-level", "wordpiece"])
@given(data=st.data())
@settings(deadline=None)
def test_pieces_of_any_token_stream_add_up_to_the_tokenizers_own_decoding(
    text_models: dict[str, tuple[TextModel, Tokenizer]], kind: str, data: st.DataObject
) -> None:
    model, tokenizer = text_models[kind]
    vocab = tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, vocab - 1), max_size=40))
    assert "".join(pieces(model, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["legacy", "always", "never"])
@given(data=st.data())
@settings(deadline=None)
def test_broken_byte_tokens_cost_only_themselves(
    text_models: dict[str, tuple[TextModel, Tokenizer]], kind: str, data: st.DataObject
) -> None:
    """The library makes a whole run of byte tokens unreadable when one of them is wrong; streaming
    cannot take back what it has shown. All that is not such a run is equal."""
    model, tokenizer = text_models[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    streamed = "".join(pieces(model, ids))
    if "\ufffd" not in whole:
        assert streamed == whole
    runs = itertools.groupby(ids, key=lambda i: (tokenizer.id_to_token(i) or "").startswith("<0x"))
    without_bytes = [i for is_byte, run in runs if not is_byte for i in run]
    expected = tokenizer.decode(without_bytes, skip_special_tokens=True)
    remaining = iter(streamed)
    assert all(char in remaining for char in expected.strip(" "))  # a subsequence


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None)
def test_a_stop_string_ends_the_text_before_it_and_is_never_shown(
    text_models: dict[str, tuple[TextModel, Tokenizer]], kind: str, data: st.DataObject
) -> None:
    model, tokenizer = text_models[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
    stop = data.draw(st.lists(st.text("tehoxs e", min_size=1, max_size=5), min_size=1, max_size=3))
    whole = model.decode(ids)
    ends = [whole.find(text) + len(text) for text in stop if text in whole]
    shown = "".join(pieces(model, ids, stop))
    assert not any(text in shown for text in stop)
    if not ends:
        assert shown == whole
    else:
        first_end = min(ends)
        found = [text for text in stop if whole[:first_end].endswith(text)]
        assert shown == whole[: first_end - max(map(len, found))]


def test_no_character_is_shown_before_its_last_byte(
    text_models: dict[str, tuple[TextModel, Tokenizer]],
) -> None:
    for kind in ("byte-level", "never"):
        model, tokenizer = text_models[kind]
        ids = tokenizer.encode("𐍈", add_special_tokens=False).ids
        assert len(ids) == 4
        assert pieces(model, ids) == ["", "", "", "𐍈", ""]
        assert pieces(model, ids[:2]) == ["", "", "\ufffd"]


def test_a_stop_string_over_several_tokens_is_held_back_and_its_token_counted(
    text_models: dict[str, tuple[TextModel, Tokenizer]],
) -> None:
    model, tokenizer = text_models["byte-level"]
    ids = tokenizer.encode("so ### and more", add_special_tokens=False).ids
    detokenizer = Detokenizer(model.new_decoder(), ["###"])
    emitted = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(one.text for one in emitted) == "so "
    num_tokens = 1 + [one.stop for one in emitted].index("###")
    assert model.decode(ids[:num_tokens]).startswith("so ###")
    assert "###" not in model.decode(ids[: num_tokens - 1])
    assert detokenizer.finish() == ""


@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", "END", "EN", " ", "<", "D"]), max_size=9
    ),
    is_open=st.booleans(),
)
@settings(deadline=None)
def test_stop_strings_apply_to_what_follows_the_thoughts(
    text_models: dict[str, tuple[TextModel, Tokenizer]], parts: list[str], is_open: bool
) -> None:
    model, tokenizer = text_models["byte-level"]
    whole = "".join(parts)
    splitter = ReasoningSplitter(is_open=is_open)
    answer = splitter.push(whole).content + splitter.finish().content
    detokenizer = Detokenizer(
        model.new_decoder(), ["END"], thoughts=ReasoningSplitter(is_open=is_open)
    )
    shown, stop = "", None
    for token_id in tokenizer.encode(whole, add_special_tokens=False).ids:
        if stop is None:
            emitted = detokenizer.push(token_id)
            shown, stop = shown + emitted.text, emitted.stop
    shown += detokenizer.finish()
    assert shown == whole.removesuffix(answer) + answer.partition("END")[0]
    assert stop == ("END" if "END" in answer else None)


def test_text_that_only_began_a_stop_string_comes_at_the_end(
    text_models: dict[str, tuple[TextModel, Tokenizer]],
) -> None:
    model, tokenizer = text_models["byte-level"]
    ids = tokenizer.encode("a ##", add_special_tokens=False).ids
    *shown, rest = pieces(model, ids, ["##!"])
    assert ("".join(shown), rest) == ("a ", "##")


def test_the_first_space_is_kept_where_the_answer_continues_a_text(
    text_models: dict[str, tuple[TextModel, Tokenizer]],
) -> None:
    for kind in ("legacy", "always"):
        model, tokenizer = text_models[kind]
        ids = tokenizer.encode("the fox", add_special_tokens=False).ids
        assert model.decode(ids) == "the fox"
        after_text = Detokenizer(model.new_decoder(after_text=True))
        assert "".join(after_text.push(token_id).text for token_id in ids) == " the fox"


def test_special_and_unknown_tokens_give_no_text(
    text_models: dict[str, tuple[TextModel, Tokenizer]],
) -> None:
    for model, tokenizer in text_models.values():
        assert model.decode([tokenizer.token_to_id("</s>"), 10**6]) == ""
