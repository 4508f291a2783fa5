"""An attempt that comes again while the engine still computes what it named before."""

from __future__ import annotations

import asyncio

from baton.config.decode import DecodeConfig
from cluster.pools.role_plan import Role
from tests.cluster.conftest import (
    TIMED_ENGINE,
    DecodeLink,
    HeldStep,
    Oracle,
    make_spec,
    nothing_held,
    running_worker,
    until,
)


async def test_an_attempt_that_comes_again_within_a_step_gets_its_own_tokens() -> None:
    forgets = DecodeConfig(finished_ttl_s=0.0)
    async with running_worker("decode-0", Role.DECODE, TIMED_ENGINE, forgets) as worker:
        role = worker.decode
        link = DecodeLink(worker.address, "router-a")
        await link.open()
        former, latter = make_spec("former", 60), make_spec("latter", 60)
        expected = Oracle().tokens(latter)
        assert Oracle().tokens(former)[0] != expected[0]
        former.request_id = latter.request_id = "x"

        step = HeldStep(worker)
        await link.reserve(former)
        await asyncio.to_thread(step.begun.wait, 10)
        await link.cancel("x")
        heard = link.of("x")
        await link.until(lambda: heard.finished)
        await until(lambda: len(role._log) == 0)
        heard.finished = 0
        await link.reserve(latter)
        await until(lambda: len(role._runs) == 1)
        step.go_on.set()
        await link.until(lambda: heard.finished)
        assert heard.in_order() == expected
        await nothing_held(worker)
        await link.close()
