"""The engine's requests as protobuf messages between a router and a worker.

The only module of the engine that knows protobuf.
"""

from __future__ import annotations

import numpy as np

from baton.errors import InvalidRequestError
from baton.v1 import worker_pb2
from engine.request import RequestId, RequestSpec, SamplingParams
from kv_transfer.block_hash import CacheScope, TokenIds

_TOKEN_BYTES = 4


def read_spec(message: worker_pb2.RequestSpec) -> RequestSpec:
    """Read the engine's request, under its attempt's id. Raises InvalidRequestError with the
    field."""
    if not message.request_id:
        raise InvalidRequestError("an empty request_id", field="request_id")
    token_ids = _read_ids(message.token_ids, "token_ids")
    if not 0 < message.num_prompt_tokens <= len(token_ids):
        raise InvalidRequestError(
            f"num_prompt_tokens: {message.num_prompt_tokens} of {len(token_ids)} token ids",
            field="num_prompt_tokens",
        )
    if message.num_public_tokens > message.num_prompt_tokens:
        raise InvalidRequestError(
            f"num_public_tokens: {message.num_public_tokens} of {message.num_prompt_tokens}",
            field="num_public_tokens",
        )
    return RequestSpec(
        request_id=attempt_key(message.request_id, message.attempt),
        token_ids=token_ids,
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=read_sampling(message),
        scope=CacheScope(message.tenant, message.cache_salt, message.num_public_tokens),
        priority=message.priority,
        grammar=message.grammar or None,
    )


def attempt_key(request_id: str, attempt: int) -> RequestId:
    """Return the id of one attempt inside a worker. The roles make it unique over time."""
    return RequestId(f"{request_id}#{attempt}")


def read_sampling(message: worker_pb2.RequestSpec) -> SamplingParams:
    """Read how to sample. Unset fields take the engine's defaults; the engine checks the values."""
    present = {field.name: value for field, value in message.sampling.ListFields()}
    present["logit_bias"] = tuple(sorted(message.sampling.logit_bias.items()))
    return SamplingParams(
        **present,
        seed=message.seed,
        stop_token_ids=frozenset(message.stop_token_ids),
        allowed_tokens=message.allowed_tokens,
        bad_words=tuple(tuple(_read_ids(word, "bad_words").tolist()) for word in message.bad_words),
    )


def _read_ids(data: bytes, field: str) -> TokenIds:
    if len(data) % _TOKEN_BYTES:
        raise InvalidRequestError(f"{field}: no whole number of little-endian uint32", field=field)
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)
