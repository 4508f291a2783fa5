"""The second engine as a worker of either role, beside our own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.config.engine import ENGINES, EngineConfig, FakeEngineConfig
from baton.config.workers import DecodeConfig
from baton.fleet import Role
from baton.v1 import worker_pb2
from engine.request import EngineEvent, SampledToken, TokenEvent
from engine.wire import read_spec
from tests.cluster.conftest import (
    DecodeLink,
    MiniRouter,
    engine_tokens,
    make_spec,
    nothing_held,
    running_worker,
)
from tests.engine.conformance.second_engine import SecondEngine

OURS = EngineConfig(
    backend="fake",
    block_size=8,
    num_blocks=40,
    num_regions=2,
    max_num_seqs=16,
    max_num_batched_tokens=64,
    fake=FakeEngineConfig(vocab_size=50_000),
)
SECOND = replace(OURS, backend="second")


@pytest.fixture(autouse=True)
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line that a new engine adds."""
    monkeypatch.setitem(ENGINES, "second", "tests.engine.conformance.tenants:SecondBuilder")


@pytest.mark.parametrize(
    ("prefills", "decodes"), [(SECOND, SECOND), (SECOND, OURS), (OURS, SECOND)]
)
async def test_either_role_is_served_by_either_engine(
    prefills: EngineConfig, decodes: EngineConfig
) -> None:
    async with (
        running_worker("prefill-0", Role.PREFILL, prefills) as prefill,
        running_worker("decode-0", Role.DECODE, decodes) as decode,
    ):
        link = await DecodeLink(decode.address, "router-a").open()
        router, writer = MiniRouter(prefill.address, link), prefill.info().ref
        for name, length in (("short", 5), ("long", 100)):
            spec = make_spec(name, length, kv_fingerprint=decode.rank.model.kv_fingerprint)
            assert await router.generate(spec, writer) == engine_tokens(OURS, read_spec(spec))
        assert decode.decode.num_other_first_tokens == 0
        await nothing_held(prefill, decode)
        await router.close()
        await link.close()


async def test_a_first_token_that_is_computed_otherwise_is_counted_and_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell = SecondEngine._tell

    def tell_another(engine: SecondEngine, event: EngineEvent) -> None:
        if isinstance(event, TokenEvent) and event.index == 0:
            event = replace(event, token=SampledToken(event.token.token_id ^ 1))
        tell(engine, event)

    monkeypatch.setattr(SecondEngine, "_tell", tell_another)
    async with (
        running_worker("prefill-0", Role.PREFILL, SECOND) as prefill,
        running_worker("decode-0", Role.DECODE, SECOND) as decode,
    ):
        link = await DecodeLink(decode.address, "router-a").open()
        router, writer = MiniRouter(prefill.address, link), prefill.info().ref
        spec = make_spec("x", kv_fingerprint=decode.rank.model.kv_fingerprint)
        assert await router.generate(spec, writer) == engine_tokens(OURS, read_spec(spec))
        assert decode.decode.num_other_first_tokens == 1
        await nothing_held(prefill, decode)
        await router.close()
        await link.close()


async def test_an_engine_without_room_within_the_bound_is_full_and_keeps_nothing() -> None:
    impatient = DecodeConfig(reserve_within_s=0.05)
    async with (
        running_worker("prefill-0", Role.PREFILL, SECOND) as prefill,
        running_worker("decode-0", Role.DECODE, SECOND, decode=impatient) as decode,
    ):
        link = await DecodeLink(decode.address, "router-a").open()
        router, writer = MiniRouter(prefill.address, link), prefill.info().ref
        fingerprint = decode.rank.model.kv_fingerprint
        first, second = (make_spec(n, 200, kv_fingerprint=fingerprint) for n in ("first", "second"))
        lease = await router.reserve(first, writer)
        await link.reserve(second, writer)
        heard = link.of("second")
        await link.until(lambda: heard.rejected)
        assert heard.rejected is not None
        assert heard.rejected.reason == worker_pb2.REJECT_REASON_NO_CAPACITY
        await router.hand_off(first, lease)
        await link.until(lambda: link.of("first").finished)
        assert link.of("first").in_order() == engine_tokens(OURS, read_spec(first))
        await nothing_held(prefill, decode)
        await router.close()
        await link.close()
