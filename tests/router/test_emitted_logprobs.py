"""Log-probabilities of tokens that are out, on their way to the next worker."""

from __future__ import annotations

import pytest

from baton.grpc_options import WORKER_MESSAGE_BYTES
from baton.v1 import common_pb2, worker_pb2
from router.request.output import sendable_logprobs


@pytest.mark.parametrize("max_message_bytes", [1 << 14, (1 << 31) - 1])
@pytest.mark.parametrize("num_prompt_bytes", [0, 4096])
def test_log_probabilities_that_are_out_go_with_the_request_where_a_worker_takes_the_message(
    max_message_bytes: int, num_prompt_bytes: int
) -> None:
    limit = min(max_message_bytes, WORKER_MESSAGE_BYTES)
    spec = worker_pb2.RequestSpec(token_ids=bytes(num_prompt_bytes))
    one = common_pb2.Logprobs(top=[common_pb2.TokenLogprob(id=1, logprob=-1.0)] * 20)
    num_sent = (limit // 2 - spec.ByteSize()) // one.ByteSize()
    known = [one] * num_sent
    assert sendable_logprobs(known, spec, max_message_bytes) == known
    reserve = worker_pb2.Reserve(spec=spec, emitted_logprobs=known)
    assert limit // 3 < reserve.ByteSize() < limit
    assert sendable_logprobs([*known, one], spec, max_message_bytes) == ()
