"""A client's request, checked as far as it can be without a model.

Pure, and quick for a message of any size: it is done on the event loop, before a request waits for
anything. Every mistake is an InvalidRequestError whose `field` is the protobuf path of what is
wrong. `validate` does the rest.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Literal
from urllib.parse import quote, unquote

from baton.config.ranges import Bounds, at_least, between
from baton.errors import InvalidRequestError, NotFoundError
from baton.v1 import common_pb2, router_pb2

REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS = 16, 64
MAX_WORD_CHARS = 256  # of a stop string or a bad word
_MAX_NAME_CHARS = 128
_MAX_GIVEN_CHARS = 64
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

Key = tuple[str, str]
"""Tenant and request id: what a request is known by in a router."""


@dataclass(frozen=True)
class RequestHead:
    """What a request is called, and how long it may take: all that no model is needed for."""

    request_id: str
    """The client's, or one that was drawn for it."""
    is_named: bool
    """The client chose the id, so it may come back for the request."""
    tenant: str
    unit: str
    session_id: str
    cache_salt: str
    traceparent: str
    priority: int
    """Among its tenant's own requests, lowest first."""
    timeout_s: float | None
    """None, as below: the client named none."""
    ttft_target_s: float | None
    itl_target_s: float | None
    seed: int | None
    resume_from_index: int | None
    arrived_s: float

    @property
    def key(self) -> Key:
        return (self.tenant, self.request_id)

    @property
    def wire_id(self) -> str:
        return wire_id(*self.key)


@dataclass(frozen=True)
class ClientRequest:
    """A client's message that passed the first checks. Nobody changes it any more."""

    head: RequestHead
    message: router_pb2.GenerateRequest
    num_bytes: int

    @cached_property
    def body_digest(self) -> bytes:
        """16 bytes; equal for requests that ask for the same, seed aside. Takes as long as the
        message is."""
        body = router_pb2.GenerateRequest()
        body.CopyFrom(self.message)
        body.DiscardUnknownFields()  # of a client of a later release
        for name in _NOT_IN_DIGEST:
            body.ClearField(name)  # type: ignore[arg-type]
        return hashlib.blake2b(body.SerializeToString(deterministic=True), digest_size=16).digest()


def check_request(
    message: router_pb2.GenerateRequest,
    model_names: Collection[str],
    drawn_id: str = "",
    arrived_s: float = 0.0,
) -> ClientRequest:
    """Check all that needs no model. `drawn_id` is taken where the client names no id.

    Raises InvalidRequestError, or NotFoundError for a model that is not served.
    """
    check_model(message.model, model_names)
    named = message.request_id
    if named and not REQUEST_ID.fullmatch(named):
        raise wrong("request_id", "1 to 128 characters, letters, digits and . _ : @ / + = - only")
    for name in ("tenant", "session_id", "cache_salt", "traceparent"):
        check_name(name, getattr(message, name))
    index = message.resume_from_index if message.HasField("resume_from_index") else None
    if index is not None and not named:
        raise wrong("request_id", "resume_from_index is only with the request_id to resume")
    head = RequestHead(
        request_id=named or drawn_id,
        is_named=bool(named),
        tenant=message.tenant,
        unit=message.unit,
        session_id=message.session_id,
        cache_salt=message.cache_salt,
        traceparent=message.traceparent,
        priority=message.priority,
        timeout_s=_seconds(message, "timeout_ms"),
        ttft_target_s=_seconds(message, "ttft_target_ms"),
        itl_target_s=_seconds(message, "itl_target_ms"),
        seed=message.seed if message.HasField("seed") else None,
        resume_from_index=index,
        arrived_s=arrived_s,
    )
    _check_stop(message)
    _check_sampling(message.sampling)
    return ClientRequest(head, message, message.ByteSize())


def wrong(field: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {problem}", field=field)


def _seconds(
    message: router_pb2.GenerateRequest,
    field: Literal["timeout_ms", "ttft_target_ms", "itl_target_ms"],
) -> float | None:
    """Return a time in seconds; None where the client named none."""
    if not message.HasField(field):
        return None
    milliseconds: int = getattr(message, field)
    if not milliseconds:
        raise wrong(field, "must be at least 1")
    return milliseconds / 1e3


# --- names --------------------------------------------------------------------------------------


def drawn_id(given: str) -> str:
    """Return an id for a request whose body names none. `given`: its client's `x-request-id`, which
    becomes part of it; it may be one for several."""
    is_name = len(given) <= _MAX_GIVEN_CHARS and REQUEST_ID.fullmatch(given)
    return f"{given}-{uuid.uuid4().hex[:8]}" if is_name else uuid.uuid4().hex


def wire_id(tenant: str, request_id: str) -> str:
    """Return the id that workers know a request by: tenants' ids never meet."""
    own = quote(request_id, safe="")
    return f"{quote(tenant, safe='')}/{own}" if tenant else own


def key_of(named: str) -> Key:
    """Return tenant and request id of a `wire_id`."""
    tenant, _, own = named.rpartition("/")
    return unquote(tenant), unquote(own)


def check_model(name: str, served: Collection[str]) -> None:
    """Raises NotFoundError for a model that is not served; "" means the one that is."""
    if name and name not in served:
        known = ", ".join(sorted(served))
        raise NotFoundError(f"unknown model {name!r}; served here: {known}", field="model")


def check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise wrong(field, f"{count}; at most {most} are taken")


def check_name(field: str, value: str) -> None:
    if len(value) > _MAX_NAME_CHARS:
        raise wrong(field, f"longer than {_MAX_NAME_CHARS} characters")
    if any(ord(char) < 0x20 for char in value):
        raise wrong(field, "control characters are not allowed")


# --- what to sample, and until when ---------------------------------------------------------------


def _check_stop(message: router_pb2.GenerateRequest) -> None:
    check_count("stop", len(message.stop), MAX_STOP_STRINGS)
    check_count("stop_token_ids", len(message.stop_token_ids), MAX_STOP_TOKEN_IDS)
    for index, stop in enumerate(message.stop):
        if not stop or len(stop) > MAX_WORD_CHARS:
            problem = "is empty" if not stop else f"exceeds {MAX_WORD_CHARS} characters"
            raise wrong(f"stop[{index}]", problem)


_LOGPROBS = between(0, 20)
_BOUNDS = {
    "temperature": between(0, 100),
    "top_p": Bounds(above=0, maximum=1),
    "min_p": between(0, 1),
    "repetition_penalty": Bounds(above=0, maximum=100),
    "presence_penalty": between(-2, 2),
    "frequency_penalty": between(-2, 2),
    "max_tokens": at_least(1),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
}


def _check_sampling(sampling: common_pb2.SamplingParams) -> None:
    for name, bounds in _BOUNDS.items():
        is_given = sampling.HasField(name)  # type: ignore[arg-type]
        if is_given and (problem := bounds.problem(getattr(sampling, name))):
            raise wrong(f"sampling.{name}", problem)
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        problem = f"{sampling.min_tokens} exceeds max_tokens {sampling.max_tokens}"
        raise wrong("sampling.min_tokens", problem)
