"""What happens to one request, as its client sees it. The protobuf messages, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from baton.finish_reason import FinishReason
from baton.v1 import common_pb2, router_pb2
from baton.wire import finish_reason_of


@dataclass(frozen=True)
class Routed:
    """Where the request runs. Comes again with each further try."""

    request_id: str
    seed: int
    prefill_worker: str  # "" when the decode worker prefills by itself
    decode_worker: str
    reason: str
    num_prompt_tokens: int
    num_cached_tokens_prefill: int
    num_cached_tokens_decode: int
    attempt: int
    unit: str


@dataclass(frozen=True)
class Prefilled:
    """The first token exists."""

    ttft_ms: float
    num_cached_tokens: int


@dataclass(frozen=True)
class HandedOff:
    """The prompt's KV has reached the decode worker."""

    kv_bytes: int
    put_ms: float
    exposed_ms: float


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms; `rank` 1 is the likeliest."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first


@dataclass(frozen=True)
class ToolCallDelta:
    """A further piece of a call. Arguments are appended; the first piece has id and name."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Tokens:
    """One or more tokens in a row. `text` is whole characters and may lag behind `ids`. Of a chat,
    thoughts are in `reasoning` and calls in `tool_calls` alone."""

    index: int
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[Logprobs | None, ...] = ()
    """One for each of `ids` if they were asked for. None: the worker that sampled the token is
    gone."""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True)
class Migrated:
    """The request continues on another worker; nothing is lost or repeated."""

    from_index: int
    reason: str


@dataclass(frozen=True)
class Usage:
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True)
class Timings:
    queue_ms: float
    ttft_ms: float
    itl_ms: float
    e2e_ms: float
    tokenize_ms: float
    reserve_ms: float
    prefill_ms: float
    second_token_ms: float
    prefill_queue_ms: float
    tpot_ms: float


@dataclass(frozen=True)
class Finished:
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop: str = ""


Event = Routed | Prefilled | HandedOff | Tokens | Migrated | Finished

_PLAIN: dict[str, type[Any]] = {
    "routed": Routed,
    "prefilled": Prefilled,
    "handed_off": HandedOff,
    "migrated": Migrated,
}


def from_response(response: router_pb2.GenerateResponse) -> Event | None:
    """None for an event that this release does not know."""
    kind = response.WhichOneof("event")
    match kind:
        case None:
            return None
        case "tokens":
            return _tokens(response.tokens)
        case "finished":
            return _finished(response.finished)
        case _:
            event: Event = _plain(_PLAIN[kind], getattr(response, kind))
            return event


def _plain(kind: type[Any], message: Any) -> Any:
    return kind(**{field.name: getattr(message, field.name) for field in fields(kind)})


def _tokens(message: router_pb2.Tokens) -> Tokens:
    logprobs = tuple(map(_logprobs, message.logprobs))
    calls = tuple(_plain(ToolCallDelta, call) for call in message.tool_calls)
    ids, said = tuple(message.ids), (message.text, logprobs, message.reasoning, calls)
    return Tokens(message.index, ids, *said)


def _logprobs(message: common_pb2.Logprobs) -> Logprobs | None:
    if message.rank == 0:
        return None
    top = tuple((top.id, top.logprob) for top in message.top)
    return Logprobs(message.logprob, message.rank, top)


def _finished(message: router_pb2.Finished) -> Finished:
    return Finished(
        reason=finish_reason_of(message.reason) or FinishReason.ERROR,
        usage=_plain(Usage, message.usage),
        timings=_plain(Timings, message.timings),
        stop=message.stop,
    )
