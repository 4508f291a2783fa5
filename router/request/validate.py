"""A client's request, completed with its model: what passes here can be run.

`client_request` has checked before what needs none. Every mistake is an InvalidRequestError whose
`field` is the protobuf path of what is wrong.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from baton.config.ranges import between
from baton.config.router import TenantLimits
from baton.errors import InvalidRequestError, NoCapacityError
from baton.v1 import common_pb2, router_pb2
from kv_transfer.block_hash import TokenIds
from router.request.chat import conversation_of
from router.request.client_request import (
    MAX_WORD_CHARS,
    ClientRequest,
    RequestHead,
    check_count,
    check_model,
    check_name,
    wrong,
)
from router.request.constraint import Constraint, constraint_of
from router.text import SamplingDefaults, TextModel

ALL_THAT_FIT = (1 << 32) - 1  # of `truncate_prompt_tokens`
MAX_BAD_WORDS, _MAX_BIASES = 128, 1024
_BIAS = between(-100, 100)
_MAX_PROMPT_LOGPROBS = 1 << 16  # of a request: they come in one message
_MAX_BYTES_PER_TOKEN = 64  # of a whole message, for every token of the context: no text needs it

NO_LIMITS = TenantLimits()


@dataclass(frozen=True)
class RequestLimits:
    max_model_len: int
    """Prompt plus output tokens that some decode worker accepts."""
    model_context: int | None = None
    """The model's context, where KV memory holds less; None: nothing holds less."""
    tenant: TenantLimits = NO_LIMITS
    close_objects: bool = True
    """Whether JSON schemas are closed (`router.answers.close_objects`)."""

    @property
    def context(self) -> int:
        return max(self.max_model_len, self.model_context or 0)

    @property
    def max_bytes(self) -> int:
        return self.context * _MAX_BYTES_PER_TOKEN + (1 << 20)


@dataclass(frozen=True)
class ParsedRequest:
    """A request that can be run, every default filled in."""

    head: RequestHead
    token_ids: TokenIds  # [num_prompt_tokens], read-only
    sampling: common_pb2.SamplingParams  # every field set, but logprobs when none are wanted
    least_tokens: int
    """Output tokens for which a worker must have room: `max_tokens` if the client named it."""
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]  # ascending; end-of-sequence ids are among them
    """Without the end-of-sequence ids when `sampling.ignore_eos`."""
    urgency: int
    """Among all requests, lowest first."""
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
    """Both as they are sent to workers."""

    def is_same_as(self, body_digest: bytes, seed: int) -> bool:
        """Whether this is the request that runs under its id with that digest and effective seed.

        A client that left the seed to the router may come back with the seed that it got.
        """
        return self.body_digest == body_digest and self.head.seed in (None, seed)


def parse_generate(
    request: ClientRequest, model: TextModel, limits: RequestLimits
) -> ParsedRequest:
    """Check what needs the model, encode the prompt, fill in defaults.

    May take milliseconds for a long prompt: call it off the event loop. Raises
    InvalidRequestError, or NoCapacityError where the KV memory of every decode worker is too small.
    """
    message, vocab_size = request.message, model.vocab_size
    is_chat = message.HasField("chat")
    if message.chat.tools and model.tool_format is None:
        problem = "the format of calls is not known; router.answers.tool_calls sets one"
        raise wrong("chat.tools", problem)
    for index, token_id in enumerate(message.stop_token_ids):
        if token_id >= vocab_size:
            raise wrong(f"stop_token_ids[{index}]", _outside(token_id, vocab_size))
    _check_biases(message.sampling.logit_bias, vocab_size)
    token_ids = encode_prompt(message, request.num_bytes, model, limits)
    if not len(token_ids):
        raise wrong(message.WhichOneof("prompt") or "", "the prompt is empty")
    sampling = _fill_in(message.sampling, model.sampling_defaults, len(token_ids), limits)
    ends = set(message.stop_token_ids)
    if not sampling.ignore_eos:
        ends |= model.eos_token_ids
    return ParsedRequest(
        head=request.head,
        token_ids=token_ids,
        sampling=sampling,
        least_tokens=message.sampling.max_tokens or max(1, sampling.min_tokens),
        stop=tuple(message.stop),
        stop_token_ids=tuple(sorted(ends)),
        urgency=limits.tenant.urgency(request.head.priority),
        is_chat=is_chat,
        tool_names=frozenset(tool.name for tool in message.chat.tools),
        continues_text=not is_chat or message.chat.continue_final_message,
        includes_stop=message.include_stop_str_in_output,
        shows_special=message.show_special_tokens,
        body_digest=request.body_digest,
        constraint=constraint_of(message, model, sampling, token_ids, limits.close_objects),
        allowed_tokens=_allowed_tokens(message, vocab_size),
        bad_words=_bad_words(message, model),
    )


Prompted = router_pb2.GenerateRequest | router_pb2.TokenizeRequest


def check_tokenize(request: Prompted, model_names: Collection[str]) -> None:
    """Raises InvalidRequestError, or NotFoundError for a model that is not served."""
    check_model(request.model, model_names)
    check_name("tenant", request.tenant)


def encode_prompt(
    request: Prompted, num_bytes: int, model: TextModel, limits: RequestLimits
) -> TokenIds:
    """Return a prompt's token ids, [num_prompt_tokens] uint32, in the vocabulary; read-only."""
    kind = request.WhichOneof("prompt")
    ids: Sequence[int]
    if num_bytes > limits.max_bytes:  # seconds and gigabytes to tokenize, for nothing
        raise InvalidRequestError(
            f"the request has {num_bytes} bytes; at most {limits.max_bytes} are taken for"
            f" a context of {limits.context} tokens",
            field=kind,
        )
    if kind is None:
        raise wrong("prompt", "give text, chat or token_ids")
    if kind == "chat":
        try:
            ids = model.encode_chat(conversation_of(request.chat))
        except RecursionError:
            raise wrong("chat", "JSON is nested too deeply") from None
    elif kind == "text":
        if not request.text:
            raise wrong("text", "the prompt is empty")
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
        problem = _outside(int(token_ids[position]), model.vocab_size)
        raise wrong(f"token_ids.ids[{position}]" if kind == "token_ids" else kind, problem)
    return token_ids


def _num_kept(request: Prompted, limits: RequestLimits) -> int:
    """Return how many of the prompt's last tokens are kept; 0: all."""
    if not isinstance(request, router_pb2.GenerateRequest):
        return 0
    if request.truncate_prompt_tokens != ALL_THAT_FIT:
        return request.truncate_prompt_tokens
    return max(1, limits.max_model_len - max(1, request.sampling.max_tokens))


def _outside(token_id: int, vocab_size: int) -> str:
    return f"{token_id} is outside the vocabulary of {vocab_size}"


# --- sampling -----------------------------------------------------------------------------------


def _check_biases(biases: Mapping[int, float], vocab_size: int) -> None:
    check_count("sampling.logit_bias", len(biases), _MAX_BIASES)
    for token_id, bias in biases.items():
        field = f"sampling.logit_bias[{token_id}]"
        if token_id >= vocab_size:
            raise wrong(field, f"outside the vocabulary of {vocab_size}")
        if problem := _BIAS.problem(bias):
            raise wrong(field, problem)


def _allowed_tokens(request: router_pb2.GenerateRequest, vocab_size: int) -> bytes:
    """Return a bit for each token of the vocabulary; nothing where the request names none."""
    if not request.HasField("allowed_token_ids"):
        return b""
    ids = np.array(request.allowed_token_ids.ids, np.int64)
    if not len(ids):
        raise wrong("allowed_token_ids", "the list is empty: nothing could be sampled")
    if ids.max() >= vocab_size:
        raise wrong("allowed_token_ids", _outside(ids.max(), vocab_size))
    allowed = np.zeros(vocab_size, bool)
    allowed[ids] = True
    return np.packbits(allowed, bitorder="little").tobytes()


def _bad_words(request: router_pb2.GenerateRequest, model: TextModel) -> tuple[bytes, ...]:
    """Return the ids of each text, at a line's beginning and after a space, as in vLLM."""
    check_count("bad_words", len(request.bad_words), MAX_BAD_WORDS)
    found = dict[bytes, None]()
    for index, word in enumerate(request.bad_words):
        if not word.strip() or len(word) > MAX_WORD_CHARS:
            raise wrong(f"bad_words[{index}]", f"1 to {MAX_WORD_CHARS} characters, not all space")
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = np.array(model.encode_within(text), "<u4")
            if not len(ids) or ids.max() >= model.vocab_size:
                raise wrong(f"bad_words[{index}]", "the model has no tokens for it")
            found[ids.tobytes()] = None
    return tuple(found)


def _fill_in(
    asked: common_pb2.SamplingParams,
    defaults: SamplingDefaults,
    num_prompt_tokens: int,
    limits: RequestLimits,
) -> common_pb2.SamplingParams:
    """Put the request's values over the model's over neutral ones. `max_tokens` fits the context
    and the tenant's limits."""
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
            raise wrong(name, problem)
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
            raise wrong("sampling.prompt_logprobs", problem)
    return sampling


def _too_long(
    name: str, num_prompt_tokens: int, wanted: int, limits: RequestLimits
) -> InvalidRequestError | NoCapacityError:
    """Return the caller's mistake, beyond the model's context; else memory is too small."""
    longest, room = limits.max_model_len, max(0, limits.max_model_len - num_prompt_tokens)
    asks = f"{name}: {num_prompt_tokens} prompt tokens and {wanted} more exceed"
    fit = f"at most {room} fit after the prompt" if room else "no answer fits after the prompt"
    if num_prompt_tokens + wanted > limits.context:
        return InvalidRequestError(f"{asks} the context of {limits.context}; {fit}", field=name)
    return NoCapacityError(
        f"{asks} the {longest} that the KV memory of the largest decode worker holds; {fit}",
        field=name,
    )
