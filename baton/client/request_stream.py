"""One request's life as its client keeps it, across routers that come and go. Does no input or
output.

1. `request()`: the message to send, to the router at `address`.
2. `absorb(response)`: what is new in a response; what was seen before a reconnect is dropped.
3. `lost(failure)`: the pause before step 1 is taken at the next address, with the router's seed and
   the first index not seen; or the error that ends the request.
"""

from __future__ import annotations

import dataclasses
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from baton import status
from baton.client.chat import chat_of, in_json
from baton.client.events import Event, Finished, Routed, Tokens, from_response
from baton.errors import (
    BatonError,
    DeadlineError,
    HandshakeError,
    InvalidRequestError,
    OverloadedError,
    ShuttingDownError,
    UnavailableError,
)
from baton.pacing import Backoff
from baton.v1 import common_pb2, router_pb2

DEFAULT_TIMEOUT_S = 600.0
_GRACE_S = 5.0  # the router's own DeadlineError comes first, and says more


class GenerateOptions(TypedDict, total=False):
    """Options of `generate` beside a prompt of text. An option that is left out has the model's
    default."""

    chat: Sequence[Mapping[str, Any]] | None
    """Messages as OpenAI's API has them, in place of the text. The next three options are OpenAI's
    too."""
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    """False lets a `tool_choice` that forces a call ask for one call only."""
    template_arguments: str | Mapping[str, Any]
    """Variables of the chat template, which OpenAI's clients send as `chat_template_kwargs`."""
    token_ids: Sequence[int] | None
    """The prompt's token ids, in place of the text."""
    model: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int
    min_tokens: int
    logprobs: int
    ignore_eos: bool
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    priority: int
    timeout_s: float
    ttft_target_ms: int
    itl_target_ms: int
    tenant: str
    cache_salt: str
    session_id: str
    request_id: str
    json_schema: str | Mapping[str, Any]
    """The schema that the answer must fit. At most one of this and the next two is set."""
    regex: str
    grammar: str


_SAMPLING_FIELDS = frozenset(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_OF_CHATS = ("tools", "tool_choice", "template_arguments", "parallel_tool_calls")
_LISTS = frozenset({"stop", "stop_token_ids", "bad_words"})
_REQUEST_FIELDS = frozenset(GenerateOptions.__annotations__) - _SAMPLING_FIELDS - _LISTS
_LONGEST_TIMEOUT_S = (2**32 - 1) / 1e3


def build_request(
    prompt: str | None = None, **options: Unpack[GenerateOptions]
) -> router_pb2.GenerateRequest:
    """A request of exactly one of a text, chat messages or token ids; it always has an id.

    Raises InvalidRequestError, naming the option, for what the wire cannot carry.
    """
    chat, token_ids = options.pop("chat", None), options.pop("token_ids", None)
    given = [value for value in (prompt, chat, token_ids) if value is not None]
    if len(given) != 1:
        raise InvalidRequestError("give exactly one of prompt, chat and token_ids", field="prompt")
    given_of_chat = [name for name in _OF_CHATS if name in options]
    of_chat: Any = {name: options.pop(name) for name in given_of_chat}  # type: ignore[misc]
    if chat is None and any(of_chat.values()):
        raise InvalidRequestError(f"{', '.join(of_chat)}: only with chat", field=min(of_chat))
    request = router_pb2.GenerateRequest()
    try:
        if prompt is not None:
            request.text = prompt
        elif chat is not None:
            request.chat.CopyFrom(chat_of(chat, **of_chat))
        elif token_ids is not None:
            request.token_ids.ids.extend(token_ids)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"prompt: {error}", field="prompt") from error
    for name, value in options.items():
        _set_option(request, name, value)
    request.request_id = request.request_id or uuid.uuid4().hex
    return request


def _set_option(request: router_pb2.GenerateRequest, name: str, value: object) -> None:
    try:
        if name == "json_schema":
            request.json_schema = in_json(value)
        elif name == "timeout_s":
            request.timeout_ms = _timeout_ms(value)
        elif name == "logit_bias":
            getattr(request.sampling, name).update(value)
        elif name == "allowed_token_ids":
            getattr(request, name).ids.extend(value)
            request.allowed_token_ids.SetInParent()
        elif name in _SAMPLING_FIELDS:
            setattr(request.sampling, name, value)
        elif name in _LISTS:
            if isinstance(value, str):  # it would be taken for a list of its characters
                raise TypeError(f"a list is expected, not {value!r}")
            getattr(request, name).extend(value)
        elif name in _REQUEST_FIELDS:
            setattr(request, name, value)
        else:
            raise InvalidRequestError(f"unknown option {name!r}", field=name)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{name}: {error}", field=name) from error


def _timeout_ms(value: object) -> int:
    """Return a timeout in milliseconds. Raises TypeError and ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a number of seconds is expected, not {value!r}")
    if not 0 < value <= _LONGEST_TIMEOUT_S:
        raise ValueError(f"must be above 0 and at most {_LONGEST_TIMEOUT_S:.0f}, not {value}")
    return max(1, int(value * 1e3))


class RequestStream:
    """Own what one client has seen of one request. Times are of `time.monotonic`."""

    def __init__(
        self,
        request: router_pb2.GenerateRequest,
        addresses: Sequence[str],
        *,
        first_address: int = 0,
        reconnect_within_s: float = 10.0,
    ) -> None:
        self._request = request
        self._addresses = addresses
        self.address_index = first_address % len(addresses)
        self._reconnect_within_s = reconnect_within_s
        timeout_s = request.timeout_ms / 1e3 if request.timeout_ms else DEFAULT_TIMEOUT_S
        self._deadline = time.monotonic() + timeout_s
        self._next_index = 0
        self._was_taken = False  # a router has, or may have, begun it
        self._has_seen_tail = False
        self._unreachable: set[str] = set()
        self._lost_at: float | None = None
        self._backoff = Backoff(0.05, 1.0)
        self.is_finished = False
        self.was_sent_away = False
        """Whether the last router, which shuts down, sent the request away."""

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def tenant(self) -> str:
        return self._request.tenant

    @property
    def address(self) -> str:
        return self._addresses[self.address_index]

    def call_timeout_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic()) + _GRACE_S

    def request(self) -> router_pb2.GenerateRequest:
        """Make the message of the next try."""
        message = router_pb2.GenerateRequest()
        message.CopyFrom(self._request)
        message.timeout_ms = max(1, int((self._deadline - time.monotonic()) * 1e3))
        if self._was_taken:
            message.resume_from_index = self._next_index
        return message

    def absorb(self, response: router_pb2.GenerateResponse) -> Event | None:
        """Return the event in a response, or None when it holds nothing new."""
        event = from_response(response)
        self._was_taken = True
        self._lost_at = None
        self._backoff.reset()
        self._unreachable.clear()
        match event:
            case Routed():
                self._request.seed = event.seed
                self._request.unit = event.unit
            case Tokens():
                return self._new_tokens(event)
            case Finished():
                self.is_finished = True
        return event

    def lost(self, failure: status.RpcFailure | None) -> float:
        """Return the seconds to pause before the next try. `failure` None: the stream ended
        unfinished.

        Raises the error that ends the request instead, when another try is of no use.
        """
        now = time.monotonic()
        problem = None if failure is None else status.from_rpc_error(failure, self.address)
        if failure is not None and problem is not None and not self._may_retry(failure, problem):
            # The router has ended it; one that is too busy to look for it cannot know.
            self.is_finished = not (self._was_taken and isinstance(problem, OverloadedError))
            raise problem
        if now >= self._deadline:
            raise DeadlineError("the request's time is over, and its router is lost")
        self._note_loss(failure, problem)
        if not self._was_taken and len(self._unreachable) == len(set(self._addresses)):
            self.is_finished = True  # it never began
            if isinstance(problem, HandshakeError):
                raise problem
            raise UnavailableError(f"no router listens at {', '.join(self._addresses)}")
        self._lost_at = self._lost_at or now
        pause_s = self._backoff.next_s()
        ends_at = min(self._deadline, self._lost_at + self._reconnect_within_s)
        if isinstance(problem, OverloadedError):
            wait_s = problem.retry_after_s or 0.0
            left_s = ends_at - now - wait_s
            if left_s < 0:
                raise problem
            # A client that was sent away at once must not come back at once.
            pause_s = max(pause_s, wait_s + random.uniform(0.0, min(wait_s / 2, left_s)))
        if now > ends_at:
            why = "shuts down" if self.was_sent_away else "was lost"
            raise UnavailableError(
                f"the router {why}, and none at {', '.join(self._addresses)} took request "
                f"{self.request_id} over within {self._reconnect_within_s:g} s"
            )
        self.address_index = (self.address_index + 1) % len(self._addresses)
        return pause_s

    def _may_retry(self, failure: status.RpcFailure, problem: BatonError) -> bool:
        if status.is_connection_lost(failure) or isinstance(problem, ShuttingDownError):
            return True
        if isinstance(problem, OverloadedError):  # its output would be lost
            return self._next_index > 0
        # A begun request lives on at its workers, even if this router cannot reach it.
        return self._was_taken and isinstance(problem, UnavailableError)

    def _note_loss(self, failure: status.RpcFailure | None, problem: BatonError | None) -> None:
        self.was_sent_away = isinstance(problem, ShuttingDownError)
        if failure is not None and status.is_never_connected(failure):
            self._unreachable.add(self.address)
        elif isinstance(problem, ShuttingDownError):
            self._was_taken |= problem.has_begun
            self._unreachable.discard(self.address)
        else:
            self._was_taken = True

    def _new_tokens(self, tokens: Tokens) -> Tokens | None:
        """Keep only unseen tokens. The last text may come alone, after all its tokens."""
        if tokens.index > self._next_index:
            raise BatonError(
                f"tokens {self._next_index} to {tokens.index - 1} of request {self.request_id} "
                "are missing from the router's stream"
            )
        if not tokens.ids:
            if self._has_seen_tail or not (tokens.text or tokens.reasoning or tokens.tool_calls):
                return None
            self._has_seen_tail = True
            return tokens
        num_seen = self._next_index - tokens.index
        if num_seen >= len(tokens.ids):
            return None
        self._next_index = tokens.index + len(tokens.ids)
        if num_seen == 0:
            return tokens
        return dataclasses.replace(
            tokens,
            index=tokens.index + num_seen,
            ids=tokens.ids[num_seen:],
            logprobs=tokens.logprobs[num_seen:],
        )
