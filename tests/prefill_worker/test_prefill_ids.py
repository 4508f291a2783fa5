"""A request id that comes again while the engine still computes what it named before."""

from __future__ import annotations

import asyncio

from baton.v1 import worker_pb2
from cluster.pools.role_plan import Role
from tests.cluster.conftest import (
    TIMED_ENGINE,
    DecodeLink,
    HeldStep,
    MiniRouter,
    Oracle,
    make_spec,
    nothing_held,
    running_worker,
    until,
)


async def test_an_id_that_comes_again_within_a_step_gets_its_own_tokens() -> None:
    async with (
        running_worker("prefill-0", Role.PREFILL, TIMED_ENGINE) as prefill,
        running_worker("decode-0", Role.DECODE) as decode,
    ):
        link = DecodeLink(decode.address, "router-a")
        await link.open()
        router = MiniRouter(prefill.address, link)
        writer = prefill.info().ref
        prompts = [make_spec("former", 60), make_spec("latter", 60)]
        leases = [await router.reserve(spec, writer) for spec in prompts]
        former, latter = prompts
        expected = Oracle().tokens(latter)
        assert Oracle().tokens(former)[0] != expected[0]
        former.request_id = latter.request_id = "x"

        step = HeldStep(prefill)
        call = router.prefill.Prefill(worker_pb2.PrefillRequest(spec=former, lease=leases[0]))
        await asyncio.to_thread(step.begun.wait, 10)
        call.cancel()
        role = prefill.prefill
        await until(lambda: role.is_idle)
        again = asyncio.create_task(router.hand_off(latter, leases[1]))
        await until(lambda: not role.is_idle)
        step.go_on.set()
        responses = await again
        assert [r.WhichOneof("event") for r in responses] == ["first_token", "handoff_done"]
        heard = link.of("latter")
        await link.until(lambda: heard.finished)
        heard.tokens[0] = responses[0].first_token.id
        assert heard.in_order() == expected
        await nothing_held(prefill, decode)
        await router.close()
        await link.close()
