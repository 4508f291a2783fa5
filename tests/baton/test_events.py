"""What a router says, as the client is given it."""

from __future__ import annotations

from baton.client.events import Logprobs, Tokens, from_response
from baton.v1 import common_pb2, router_pb2


def test_a_token_of_which_no_logprobs_are_known_has_none() -> None:
    known = common_pb2.Logprobs(
        logprob=-0.5, rank=1, top=[common_pb2.TokenLogprob(id=7, logprob=-0.5)]
    )
    tokens = router_pb2.Tokens(index=3, ids=[7, 8], logprobs=[known, common_pb2.Logprobs()])
    event = from_response(router_pb2.GenerateResponse(tokens=tokens))
    assert isinstance(event, Tokens)
    assert event.logprobs == (Logprobs(-0.5, 1, ((7, -0.5),)), None)
