"""What either role calls invalid it calls by its field, as the wire and the client name it."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import grpc.aio
import pytest

from baton.errors import InvalidRequestError
from baton.status import from_rpc_error
from baton.v1 import worker_pb2
from cluster.pools.role_plan import Role
from tests.cluster.conftest import DecodeLink, MiniRouter, make_spec, nothing_held, running_worker


def unknown_token(spec: worker_pb2.RequestSpec) -> None:
    spec.token_ids = spec.token_ids[:-4] + b"\xff\xff\x00\x00"


def half_a_token(spec: worker_pb2.RequestSpec) -> None:
    spec.token_ids = spec.token_ids[:-2]


def more_prompt_than_tokens(spec: worker_pb2.RequestSpec) -> None:
    spec.num_prompt_tokens += 1


def improbable(spec: worker_pb2.RequestSpec) -> None:
    spec.sampling.top_p = 2.0


WRONG = (
    (unknown_token, "token_ids"),
    (half_a_token, "token_ids"),
    (more_prompt_than_tokens, "num_prompt_tokens"),
    (improbable, "sampling.top_p"),
)


def wrong(
    request_id: str, spoil: Callable[[worker_pb2.RequestSpec], None]
) -> worker_pb2.RequestSpec:
    spec = make_spec(request_id)
    spoil(spec)
    return spec


async def test_a_worker_that_refuses_a_request_names_the_field() -> None:
    async with (
        running_worker("prefill-0", Role.PREFILL) as prefill,
        running_worker("decode-0", Role.DECODE) as decode,
    ):
        link = DecodeLink(decode.address, "router-a/1")
        await link.open()
        router = MiniRouter(prefill.address, link)
        writer = prefill.info().ref
        for number, (spoil, field) in enumerate(WRONG):
            for name, named in ((f"local-{number}", None), (f"apart-{number}", writer)):
                await link.reserve(wrong(name, spoil), named)
                heard = link.of(name)
                await link.until(lambda heard=heard: heard.rejected)  # type: ignore[misc]
                assert heard.rejected is not None
                assert heard.rejected.reason == worker_pb2.REJECT_REASON_INVALID
                assert heard.rejected.field == field
            lease = await router.reserve(make_spec(f"good-{number}"), writer)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await router.hand_off(wrong(f"good-{number}", spoil), lease)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            refused = from_rpc_error(caught.value)
            assert (refused.field, refused.reason) == (field, InvalidRequestError.reason)
        await nothing_held(prefill, decode)
        await router.close()
        await link.close()
