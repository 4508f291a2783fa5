"""A client's request, checked and completed: what passes here can be run.

Every mistake is an InvalidRequestError whose `field` is the protobuf path of what is wrong.
"""

from __future__ import annotations

import hashlib
import math
import re
import uuid
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from baton.config.router import TenantLimits
from baton.errors import InvalidRequestError, NoCapacityError, NotFoundError
from baton.v1 import common_pb2, router_pb2
from kv_transfer.block_hash import TokenIds
from router.request.chat import conversation_of
from router.request.constraint import Constraint, constraint_of
from router.text import SamplingDefaults, TextModel

REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS = 16, 64
ALL_THAT_FIT = (1 << 32) - 1  # of `truncate_prompt_tokens`
MAX_BAD_WORDS, _MAX_BIASES = 128, 1024
_MAX_STOP_CHARS = 256
_MAX_LOGPROBS = 20
_MAX_PROMPT_LOGPROBS = 1 << 16  # of a request: they come in one message
_MAX_NAME_CHARS = 128
_MAX_GIVEN_CHARS = 64
_MAX_BYTES_PER_TOKEN = 64  # of a whole message, for every token of the context: no text needs it
# What a client may change when it comes back for a request that runs.
_NOT_IN_DIGEST = (
    "request_id",
    "resume_from_index",
    "seed",
    "tenant",
    "timeout_ms",
    "traceparent",
    "unit",
)


NO_LIMITS = TenantLimits()


@dataclass(frozen=True)
class RequestLimits:
    max_model_len: int
    """Prompt plus output tokens that some decode worker accepts."""
    model_context: int | None = None
    """Of the model, where KV memory holds less than it; None: nothing holds less."""
    model_names: Collection[str] = ()
    """Names a request may call the model by; a request that names none means this one."""
    tenant: TenantLimits = NO_LIMITS
    close_objects: bool = True
    """Of JSON schemas (`router.answers.close_objects`)."""

    @property
    def context(self) -> int:
        return max(self.max_model_len, self.model_context or 0)

    @property
    def max_bytes(self) -> int:
        return self.context * _MAX_BYTES_PER_TOKEN + (1 << 20)


@dataclass(frozen=True)
class ParsedRequest:
    """A request that can be run, every default filled in."""

    request_id: str  # "" when the router is to draw one
    tenant: str
    token_ids: TokenIds  # [num_prompt_tokens], read-only
    sampling: common_pb2.SamplingParams  # every field set, but logprobs when none are wanted
    least_tokens: int
    """Output tokens for which a worker must have room: `max_tokens` if the client named it."""
    seed: int | None  # None: the router draws one
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]  # ascending; end-of-sequence ids are among them
    """Without the end-of-sequence ids when `sampling.ignore_eos`."""
    timeout_s: float | None
    cache_salt: str
    priority: int
    """Among its tenant's own requests, lowest first; `urgency`: among all."""
    urgency: int
    ttft_target_s: float | None
    """None: the client named none."""
    itl_target_s: float | None
    session_id: str
    resume_from_index: int | None
    is_chat: bool
    tool_names: frozenset[str]
    """What its answer may call."""
    continues_text: bool
    includes_stop: bool
    shows_special: bool
    body_digest: bytes
    """Equal for two requests that ask for the same, seed aside (see `is_same_as`)."""
    constraint: Constraint | None = None
    allowed_tokens: bytes = b""
    bad_words: tuple[bytes, ...] = ()
    """Both as workers are told them."""

    def is_same_as(self, body_digest: bytes, seed: int) -> bool:
        """Whether this is the request that runs under its id with that digest and effective seed.

        A client that left the seed to the router may come back with the seed that it got.
        """
        return self.body_digest == body_digest and self.seed in (None, seed)


def parse_generate(
    request: router_pb2.GenerateRequest, model: TextModel, limits: RequestLimits
) -> ParsedRequest:
    """Check all fields, encode the prompt, fill in defaults.

    May take milliseconds for a long prompt: call it off the event loop. Raises
    InvalidRequestError, NoCapacityError where the KV memory of every decode worker is too small, or
    NotFoundError for an unknown model.
    """
    check_names(request, limits)
    if request.chat.tools and model.tool_format is None:
        raise _wrong(
            "chat.tools", "the format of calls is not known; router.answers.tool_calls sets one"
        )
    _check_stop(request, model.vocab_size)
    _check_sampling(request.sampling)
    _check_biases(request.sampling.logit_bias, model.vocab_size)
    token_ids = encode_prompt(request, model, limits)
    if not len(token_ids):
        raise _wrong(request.WhichOneof("prompt") or "", "the prompt is empty")
    sampling = _fill_in(request.sampling, model.sampling_defaults, len(token_ids), limits)
    ends = set(request.stop_token_ids)
    if not sampling.ignore_eos:
        ends |= model.eos_token_ids
    index = request.resume_from_index if request.HasField("resume_from_index") else None
    return ParsedRequest(
        request_id=request.request_id,
        tenant=request.tenant,
        token_ids=token_ids,
        sampling=sampling,
        least_tokens=request.sampling.max_tokens or max(1, sampling.min_tokens),
        seed=request.seed if request.HasField("seed") else None,
        stop=tuple(request.stop),
        stop_token_ids=tuple(sorted(ends)),
        timeout_s=_seconds(request, "timeout_ms"),
        cache_salt=request.cache_salt,
        priority=request.priority,
        urgency=limits.tenant.urgency(request.priority),
        ttft_target_s=_seconds(request, "ttft_target_ms"),
        itl_target_s=_seconds(request, "itl_target_ms"),
        session_id=request.session_id,
        resume_from_index=index,
        is_chat=request.HasField("chat"),
        tool_names=frozenset(tool.name for tool in request.chat.tools),
        continues_text=not request.HasField("chat") or request.chat.continue_final_message,
        includes_stop=request.include_stop_str_in_output,
        shows_special=request.show_special_tokens,
        body_digest=body_digest(request),
        constraint=constraint_of(request, model, sampling, token_ids, limits.close_objects),
        allowed_tokens=_allowed_tokens(request, model.vocab_size),
        bad_words=_bad_words(request, model),
    )


def _seconds(
    request: router_pb2.GenerateRequest,
    field: Literal["timeout_ms", "ttft_target_ms", "itl_target_ms"],
) -> float | None:
    """None where the client named none."""
    milliseconds: int = getattr(request, field)
    return milliseconds / 1e3 if request.HasField(field) else None


def body_digest(request: router_pb2.GenerateRequest) -> bytes:
    """16 bytes; equal for requests that ask for the same, seed aside."""
    body = router_pb2.GenerateRequest()
    body.CopyFrom(request)
    body.DiscardUnknownFields()  # of a client of a later release
    for name in _NOT_IN_DIGEST:
        body.ClearField(name)  # type: ignore[arg-type]
    return hashlib.blake2b(body.SerializeToString(deterministic=True), digest_size=16).digest()


Prompted = router_pb2.GenerateRequest | router_pb2.TokenizeRequest


def encode_prompt(request: Prompted, model: TextModel, limits: RequestLimits) -> TokenIds:
    """Token ids of a request's prompt, [num_prompt_tokens] uint32, in the vocabulary; read-only."""
    kind = request.WhichOneof("prompt")
    ids: Sequence[int]
    if request.ByteSize() > limits.max_bytes:  # seconds and gigabytes to tokenize, for nothing
        raise InvalidRequestError(
            f"the request has {request.ByteSize()} bytes; at most {limits.max_bytes} are taken for"
            f" a context of {limits.context} tokens",
            field=kind,
        )
    if kind is None:
        raise InvalidRequestError("a prompt is needed: text, chat or token_ids", field="prompt")
    if kind == "chat":
        try:
            ids = model.encode_chat(conversation_of(request.chat))
        except RecursionError:
            raise InvalidRequestError("chat: JSON is nested too deeply", field="chat") from None
    elif kind == "text":
        if not request.text:
            raise InvalidRequestError("text: the prompt is empty", field="text")
        ids = model.encode(request.text, is_bare=request.omit_special_tokens)
    else:
        assert isinstance(request, router_pb2.GenerateRequest)
        ids = request.token_ids.ids
    ids = ids[-_num_kept(request, limits) :]
    token_ids = np.array(array("I", ids))  # a third of the time that a list takes NumPy
    token_ids.flags.writeable = False
    outside = np.flatnonzero(token_ids >= model.vocab_size)
    if len(outside):
        position = int(outside[0])
        problem = f"{token_ids[position]} is outside the vocabulary of {model.vocab_size}"
        raise _wrong(f"token_ids.ids[{position}]" if kind == "token_ids" else kind, problem)
    return token_ids


def _num_kept(request: Prompted, limits: RequestLimits) -> int:
    """Of the prompt's last tokens; 0: all."""
    if not isinstance(request, router_pb2.GenerateRequest):
        return 0
    if request.truncate_prompt_tokens != ALL_THAT_FIT:
        return request.truncate_prompt_tokens
    return max(1, limits.max_model_len - max(1, request.sampling.max_tokens))


def _wrong(field: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {problem}", field=field)


# --- names --------------------------------------------------------------------------------------


def drawn_id(given: str) -> str:
    """Return an id for a request whose body names none. `given`: its client's `x-request-id`, which
    becomes part of it; it may be one for several."""
    is_name = len(given) <= _MAX_GIVEN_CHARS and REQUEST_ID.fullmatch(given)
    return f"{given}-{uuid.uuid4().hex[:8]}" if is_name else uuid.uuid4().hex


def _check_model_name(name: str, limits: RequestLimits) -> None:
    """Raises NotFoundError for a model that is not served; "" means the one that is."""
    if name and name not in limits.model_names:
        known = ", ".join(sorted(limits.model_names))
        raise NotFoundError(f"unknown model {name!r}; served here: {known}", field="model")


def check_names(request: router_pb2.GenerateRequest, limits: RequestLimits) -> None:
    _check_model_name(request.model, limits)
    if request.request_id and not REQUEST_ID.fullmatch(request.request_id):
        raise _wrong("request_id", "1 to 128 characters, letters, digits and . _ : @ / + = - only")
    for name in ("tenant", "session_id", "cache_salt", "traceparent"):
        _check_name(name, getattr(request, name))
    for name in ("timeout_ms", "ttft_target_ms", "itl_target_ms"):
        if request.HasField(name) and getattr(request, name) == 0:  # type: ignore[arg-type]
            raise _wrong(name, "must be at least 1")
    if request.HasField("resume_from_index") and not request.request_id:
        raise _wrong("request_id", "resume_from_index is only with the request_id to resume")


def check_tokenize_names(request: Prompted, limits: RequestLimits) -> None:
    _check_model_name(request.model, limits)
    _check_name("tenant", request.tenant)


def _check_name(field: str, value: str) -> None:
    if len(value) > _MAX_NAME_CHARS:
        raise _wrong(field, f"longer than {_MAX_NAME_CHARS} characters")
    if any(ord(char) < 0x20 for char in value):
        raise _wrong(field, "control characters are not allowed")


def _check_stop(request: router_pb2.GenerateRequest, vocab_size: int) -> None:
    if len(request.stop) > MAX_STOP_STRINGS:
        raise _wrong("stop", f"{len(request.stop)} strings; at most {MAX_STOP_STRINGS} are taken")
    for index, stop in enumerate(request.stop):
        if not stop or len(stop) > _MAX_STOP_CHARS:
            problem = "is empty" if not stop else f"exceeds {_MAX_STOP_CHARS} characters"
            raise InvalidRequestError(f"stop: string {index} {problem}", field=f"stop[{index}]")
    if len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _wrong("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} are taken")
    for index, token_id in enumerate(request.stop_token_ids):
        if token_id >= vocab_size:
            problem = f"{token_id} is outside the vocabulary of {vocab_size}"
            raise _wrong(f"stop_token_ids[{index}]", problem)


# --- sampling -----------------------------------------------------------------------------------

# Field, what it must satisfy, and how that reads. Not-a-number and infinities are refused first.
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: 0.0 <= value <= 100.0, "between 0 (greedy) and 100"),
    ("top_p", lambda value: 0.0 < value <= 1.0, "above 0 and at most 1"),
    ("min_p", lambda value: 0.0 <= value <= 1.0, "between 0 and 1"),
    ("repetition_penalty", lambda value: 0.0 < value <= 100.0, "above 0 and at most 100"),
    ("presence_penalty", lambda value: -2.0 <= value <= 2.0, "between -2 and 2"),
    ("frequency_penalty", lambda value: -2.0 <= value <= 2.0, "between -2 and 2"),
    ("max_tokens", lambda value: value >= 1, "at least 1"),
)


def _check_sampling(sampling: common_pb2.SamplingParams) -> None:
    for name, is_valid, meaning in _RANGES:
        if not sampling.HasField(name):  # type: ignore[arg-type]
            continue
        value = getattr(sampling, name)
        if not math.isfinite(value) or not is_valid(value):
            raise _wrong(f"sampling.{name}", f"must be {meaning}, not {value:g}")
    for name in ("logprobs", "prompt_logprobs"):
        if (wanted := getattr(sampling, name)) > _MAX_LOGPROBS:
            raise _wrong(f"sampling.{name}", f"at most {_MAX_LOGPROBS}, not {wanted}")
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        problem = f"{sampling.min_tokens} exceeds max_tokens {sampling.max_tokens}"
        raise _wrong("sampling.min_tokens", problem)


def _check_biases(biases: Mapping[int, float], vocab_size: int) -> None:
    if len(biases) > _MAX_BIASES:
        raise _wrong("sampling.logit_bias", f"at most {_MAX_BIASES} are taken")
    for token_id, bias in biases.items():
        field = f"sampling.logit_bias[{token_id}]"
        if token_id >= vocab_size:
            raise _wrong(field, f"outside the vocabulary of {vocab_size}")
        if not -100 <= bias <= 100:
            raise _wrong(field, f"must be between -100 and 100, not {bias:g}")


def _allowed_tokens(request: router_pb2.GenerateRequest, vocab_size: int) -> bytes:
    """A bit for each token of the vocabulary; empty where the request names none."""
    if not request.HasField("allowed_token_ids"):
        return b""
    ids = np.array(request.allowed_token_ids.ids, np.int64)
    if not len(ids):
        raise _wrong("allowed_token_ids", "the list is empty: nothing could be sampled")
    if ids.max() >= vocab_size:
        raise _wrong("allowed_token_ids", f"{ids.max()} is outside the vocabulary of {vocab_size}")
    allowed = np.zeros(vocab_size, bool)
    allowed[ids] = True
    return np.packbits(allowed, bitorder="little").tobytes()


def _bad_words(request: router_pb2.GenerateRequest, model: TextModel) -> tuple[bytes, ...]:
    """The ids of each text at the beginning of a line and after a space, as in vLLM."""
    if len(request.bad_words) > MAX_BAD_WORDS:
        raise _wrong("bad_words", f"at most {MAX_BAD_WORDS} are taken")
    found = dict[bytes, None]()
    for index, word in enumerate(request.bad_words):
        if not word.strip() or len(word) > _MAX_STOP_CHARS:
            raise _wrong(f"bad_words[{index}]", f"1 to {_MAX_STOP_CHARS} characters, not all space")
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = np.array(model.encode_within(text), "<u4")
            if not len(ids) or ids.max() >= model.vocab_size:
                raise _wrong(f"bad_words[{index}]", "the model has no tokens for it")
            found[ids.tobytes()] = None
    return tuple(found)


def _fill_in(
    asked: common_pb2.SamplingParams,
    defaults: SamplingDefaults,
    num_prompt_tokens: int,
    limits: RequestLimits,
) -> common_pb2.SamplingParams:
    """The request's values over the model's over neutral ones; max_tokens fits the context and the
    tenant's limits."""
    room = limits.max_model_len - num_prompt_tokens
    largest = limits.tenant.largest_max_tokens or limits.max_model_len
    for name, wanted in (
        ("prompt", 1),
        ("sampling.max_tokens", asked.max_tokens),
        ("sampling.min_tokens", asked.min_tokens),
    ):
        if wanted > room:
            raise _too_long(name, num_prompt_tokens, wanted, limits)
        if wanted > largest:
            problem = f"{wanted} exceeds the {largest} that this tenant may ask for"
            raise _wrong(name, problem)
    most = min(room, largest, limits.tenant.default_max_tokens or room)
    sampling = common_pb2.SamplingParams(
        temperature=defaults.temperature,
        top_k=defaults.top_k,
        top_p=defaults.top_p,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        max_tokens=max(asked.min_tokens, most),
        min_tokens=0,
        ignore_eos=False,
    )
    sampling.MergeFrom(asked)
    if sampling.HasField("prompt_logprobs"):
        sampling.logprobs = asked.logprobs  # they come with it
        if num_prompt_tokens * (1 + sampling.prompt_logprobs) > _MAX_PROMPT_LOGPROBS:
            problem = f"more than {_MAX_PROMPT_LOGPROBS} in all, of {num_prompt_tokens} tokens"
            raise _wrong("sampling.prompt_logprobs", problem)
    return sampling


def _too_long(
    name: str, num_prompt_tokens: int, wanted: int, limits: RequestLimits
) -> InvalidRequestError | NoCapacityError:
    """Beyond the model's context it is the caller's mistake; else memory that is too small."""
    longest, room = limits.max_model_len, max(0, limits.max_model_len - num_prompt_tokens)
    asks = f"{name}: {num_prompt_tokens} prompt tokens and {wanted} more exceed"
    fit = f"at most {room} fit after the prompt" if room else "no answer fits after the prompt"
    if num_prompt_tokens + wanted > limits.context:
        return InvalidRequestError(f"{asks} the context of {limits.context}; {fit}", field=name)
    return NoCapacityError(
        f"{asks} the {longest} that the KV memory of the largest decode worker holds; {fit}",
        field=name,
    )
