"""Both roles over real gRPC in one process: fake engine, in-memory transport."""

from __future__ import annotations

from typing import Any

from baton.v1 import common_pb2


async def test_a_handed_off_request_gives_the_oracles_tokens(pair: Any, kit: Any) -> None:
    for number, length in enumerate((1, 7, 8, 9, 64, 200)):
        spec = kit.make_spec(f"r{number}", length)
        assert await pair.router.generate(spec, pair.writer) == kit.oracle.tokens(spec)


async def test_local_prefill_gives_the_oracles_tokens(pair: Any, kit: Any) -> None:
    spec = kit.make_spec("local", 100)
    heard = pair.link.of("local")
    await pair.link.reserve(spec)
    await pair.link.until(lambda: heard.finished)
    assert heard.reserved is not None
    assert not heard.reserved.HasField("lease")
    assert heard.in_order() == kit.oracle.tokens(spec)
    assert heard.finished == common_pb2.FINISH_REASON_LENGTH
