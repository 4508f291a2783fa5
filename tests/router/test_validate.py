"""Every mistake in a request is reported with its field; what passes is complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.errors import BatonError, InvalidRequestError, NoCapacityError, NotFoundError
from baton.v1.common_pb2 import SamplingParams
from baton.v1.router_pb2 import (
    ChatMessage,
    ChatMessages,
    GenerateRequest,
    TokenIds,
    TokenizeRequest,
)
from router.request.validate import RequestLimits, check_tokenize
from router.text import TextModel
from tests.router.text_fixtures import NAMES, byte_level_tokenizer, load_text, parse, write_model

LIMITS = RequestLimits(max_model_len=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("model")
    generation = {"temperature": 0.5, "top_k": 20, "top_p": 0.9}
    return load_text(write_model(folder, byte_level_tokenizer(), generation=generation))


def sampled(**values: Any) -> Callable[[GenerateRequest], None]:
    return lambda request: request.sampling.MergeFrom(SamplingParams(**values))


def changed(**values: object) -> Callable[[GenerateRequest], None]:
    return lambda request: request.MergeFrom(GenerateRequest(**values))


def chat(*messages: tuple[str, str]) -> ChatMessages:
    return ChatMessages(
        messages=[ChatMessage(role=role, content=content) for role, content in messages]
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda request: request.ClearField("text"), "prompt"),
        (changed(text=""), "text"),
        (changed(text="x" * 200), "prompt"),
        (changed(token_ids=TokenIds()), "token_ids"),
        (changed(token_ids=TokenIds(ids=[1, 2, 420])), "token_ids.ids[2]"),
        (changed(token_ids=TokenIds(ids=[2**32 - 1])), "token_ids.ids[0]"),
        (changed(token_ids=TokenIds(ids=[5] * 64)), "prompt"),
        (changed(chat=chat()), "chat.messages"),
        (changed(chat=chat(("user", "a"), ("robot", "b"))), "chat.messages[1].role"),
        (sampled(temperature=-0.1), "sampling.temperature"),
        (sampled(temperature=float("nan")), "sampling.temperature"),
        (sampled(temperature=float("inf")), "sampling.temperature"),
        (sampled(top_p=0.0), "sampling.top_p"),
        (sampled(top_p=1.1), "sampling.top_p"),
        (sampled(min_p=-0.5), "sampling.min_p"),
        (sampled(min_p=2.0), "sampling.min_p"),
        (sampled(repetition_penalty=0.0), "sampling.repetition_penalty"),
        (sampled(presence_penalty=2.5), "sampling.presence_penalty"),
        (sampled(frequency_penalty=-2.5), "sampling.frequency_penalty"),
        (sampled(max_tokens=0), "sampling.max_tokens"),
        (sampled(max_tokens=64), "sampling.max_tokens"),
        (sampled(max_tokens=4, min_tokens=5), "sampling.min_tokens"),
        (sampled(min_tokens=64), "sampling.min_tokens"),
        (sampled(logprobs=21), "sampling.logprobs"),
        (sampled(prompt_logprobs=21), "sampling.prompt_logprobs"),
        (sampled(logit_bias={420: 1.0}), "sampling.logit_bias[420]"),
        (sampled(logit_bias={7: 100.5}), "sampling.logit_bias[7]"),
        (sampled(logit_bias={7: float("nan")}), "sampling.logit_bias[7]"),
        (sampled(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias"),
        (changed(allowed_token_ids=TokenIds()), "allowed_token_ids"),
        (changed(allowed_token_ids=TokenIds(ids=[1, 420])), "allowed_token_ids"),
        (changed(bad_words=["fox", " "]), "bad_words[1]"),
        (changed(bad_words=["x" * 257]), "bad_words[0]"),
        (changed(bad_words=["x"] * 129), "bad_words"),
        (changed(stop=["ok", ""]), "stop[1]"),
        (changed(stop=["x" * 257]), "stop[0]"),
        (changed(stop=["x"] * 17), "stop"),
        (changed(stop_token_ids=[1, 420]), "stop_token_ids[1]"),
        (changed(stop_token_ids=[1] * 65), "stop_token_ids"),
        (changed(request_id="no spaces"), "request_id"),
        (changed(request_id="x" * 129), "request_id"),
        (changed(tenant="x" * 129), "tenant"),
        (changed(tenant="a\nb"), "tenant"),
        (changed(traceparent="0" * 129), "traceparent"),
        (changed(timeout_ms=0), "timeout_ms"),
        (changed(resume_from_index=3), "request_id"),
    ],
)
def test_a_mistake_is_reported_with_its_field(
    model: TextModel, change: Callable[[GenerateRequest], None], field: str
) -> None:
    request = GenerateRequest(text="the fox")
    change(request)
    with pytest.raises(InvalidRequestError) as caught:
        parse(request, model, LIMITS)
    assert caught.value.field == field
    assert caught.value.message


def test_a_tenant_s_name_in_a_call_to_tokenize_is_checked_too() -> None:
    for tenant in ("x" * 129, "a\nb"):
        with pytest.raises(InvalidRequestError) as caught:
            check_tokenize(TokenizeRequest(text="a", tenant=tenant), NAMES)
        assert caught.value.field == "tenant"
    with pytest.raises(NotFoundError):
        check_tokenize(TokenizeRequest(text="a", model="other"), NAMES)
    check_tokenize(TokenizeRequest(text="a", model="demo", tenant="red"), NAMES)


def test_an_unknown_model_is_not_found_and_the_known_ones_are_named(model: TextModel) -> None:
    with pytest.raises(NotFoundError, match=r"'other'.*demo"):
        parse(GenerateRequest(text="a", model="other"), model, LIMITS)
    assert parse(GenerateRequest(text="a", model="demo"), model, LIMITS)


def test_defaults_are_the_models_and_max_tokens_fills_the_context(model: TextModel) -> None:
    parsed = parse(GenerateRequest(text="the fox"), model, LIMITS)
    sampling = parsed.sampling
    assert sampling.temperature == 0.5
    assert sampling.top_k == 20
    assert sampling.top_p == pytest.approx(0.9)
    assert sampling.max_tokens == 64 - len(parsed.token_ids)
    unset = {
        field.name
        for field in SamplingParams.DESCRIPTOR.fields
        if field.has_presence and not sampling.HasField(field.name)
    }
    assert unset == {"logprobs", "prompt_logprobs"}
    assert parsed.stop_token_ids == tuple(sorted(model.eos_token_ids))
    assert parsed.head.seed is None
    assert parsed.head.resume_from_index is None
    assert not parsed.token_ids.flags.writeable


def test_zero_is_a_value_and_not_absence(model: TextModel) -> None:
    request = GenerateRequest(
        text="a", seed=0, sampling=SamplingParams(temperature=0.0, top_k=0, logprobs=0)
    )
    parsed = parse(request, model, LIMITS)
    assert parsed.head.seed == 0
    assert parsed.sampling.temperature == 0.0
    assert parsed.sampling.top_k == 0
    assert parsed.sampling.HasField("logprobs")


def test_ignoring_the_end_of_sequence_keeps_the_requests_own_stop_ids(model: TextModel) -> None:
    request = GenerateRequest(
        text="a", stop_token_ids=[9, 7], sampling=SamplingParams(ignore_eos=True)
    )
    assert parse(request, model, LIMITS).stop_token_ids == (7, 9)


def test_workers_are_told_what_may_be_sampled_as_bits_and_sequences(model: TextModel) -> None:
    ids = TokenIds(ids=[9, 0, 419, 9])
    request = GenerateRequest(text="a", allowed_token_ids=ids, bad_words=["fox", " fox", "the owl"])
    parsed = parse(request, model, LIMITS)
    bits = np.unpackbits(np.frombuffer(parsed.allowed_tokens, np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [0, 9, 419]
    words = [model.decode(np.frombuffer(word, "<u4").tolist()) for word in parsed.bad_words]
    assert words == ["fox", " fox", "the owl", " the owl"]


def test_the_longest_prompt_leaves_room_for_one_token(model: TextModel) -> None:
    request = GenerateRequest(token_ids=TokenIds(ids=[5] * 63))
    assert parse(request, model, LIMITS).sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("num_prompt_tokens", "sampling", "kind", "field"),
    [
        (40, SamplingParams(), NoCapacityError, "prompt"),
        (64, SamplingParams(), InvalidRequestError, "prompt"),
        (30, SamplingParams(max_tokens=11), NoCapacityError, "sampling.max_tokens"),
        (30, SamplingParams(max_tokens=35), InvalidRequestError, "sampling.max_tokens"),
        (30, SamplingParams(min_tokens=11), NoCapacityError, "sampling.min_tokens"),
    ],
)
def test_what_only_memory_is_too_small_for_is_no_mistake_of_the_caller(
    model: TextModel,
    num_prompt_tokens: int,
    sampling: SamplingParams,
    kind: type[BatonError],
    field: str,
) -> None:
    limits = RequestLimits(max_model_len=40, model_context=64)
    ids = TokenIds(ids=[5] * num_prompt_tokens)
    with pytest.raises(BatonError) as caught:
        parse(GenerateRequest(token_ids=ids, sampling=sampling), model, limits)
    assert (type(caught.value), caught.value.field) == (kind, field)


def test_the_same_body_is_the_same_request_whatever_a_reconnect_changes(model: TextModel) -> None:
    def parse_with(**values: object) -> bytes:
        request = GenerateRequest(text="the fox", request_id="r", **values)
        return parse(request, model, LIMITS).body_digest

    first = parse(GenerateRequest(text="the fox", request_id="r"), model, LIMITS)
    again = parse_with(seed=77, resume_from_index=5, timeout_ms=1, traceparent="t")
    assert again == first.body_digest
    assert first.is_same_as(again, 77)
    seeded = parse(GenerateRequest(text="the fox", seed=1), model, LIMITS)
    assert seeded.is_same_as(again, 1)
    assert not seeded.is_same_as(again, 2)
    assert parse_with(stop=["x"]) != first.body_digest
    assert parse_with(cache_salt="x") != first.body_digest


def test_what_only_a_newer_client_knows_makes_no_other_request(model: TextModel) -> None:
    newer = b"\xf2\x7d\x03new"  # field 2014, three bytes
    plain = GenerateRequest(text="the fox", request_id="r", sampling=SamplingParams(top_k=3))
    sampling = SamplingParams.FromString(plain.sampling.SerializeToString() + newer)
    deep = GenerateRequest(text="the fox", request_id="r", sampling=sampling)
    flat = GenerateRequest.FromString(plain.SerializeToString() + newer)
    assert newer in flat.SerializeToString()
    assert newer in deep.SerializeToString()
    digests = {parse(one, model, LIMITS).body_digest for one in (plain, flat, deep)}
    assert len(digests) == 1


def test_text_that_is_not_unicode_never_gets_into_a_message() -> None:
    with pytest.raises(ValueError, match=r"surrogate|UTF"):
        GenerateRequest(text="\ud800")
    wire = GenerateRequest(text="ab").SerializeToString().replace(b"ab", b"\xff\xfe")
    with pytest.raises(Exception, match=r"(?i)utf-8|parse"):
        GenerateRequest.FromString(wire)


def test_text_that_needs_tokens_the_model_lacks_is_refused(tmp_path: Path) -> None:
    small = load_text(write_model(tmp_path, byte_level_tokenizer(), vocab_size=8))
    with pytest.raises(InvalidRequestError, match="outside the vocabulary of 8"):
        parse(GenerateRequest(text="the fox"), small, LIMITS)
