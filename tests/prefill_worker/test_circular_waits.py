"""Workers that each hold what the other's prompt needs let go of it, and judge nobody stuck."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from baton.config.workers import RegistryConfig
from cluster.pools.role_plan import Role
from tests.cluster.conftest import (
    ENGINE,
    DecodeLink,
    MiniRouter,
    make_spec,
    nothing_held,
    running_worker,
)

ONE_PROMPT = replace(ENGINE, num_blocks=10)
JUDGE = RegistryConfig(stuck_after_s=0.2)


async def test_two_full_workers_whose_prompts_wait_for_each_other_give_their_leases_up() -> None:
    async with (
        running_worker("a", Role.MIXED, ONE_PROMPT, registry=JUDGE) as a,
        running_worker("b", Role.MIXED, ONE_PROMPT, registry=JUDGE) as b,
    ):
        links = [DecodeLink(worker.address, "router") for worker in (a, b)]
        for link in links:
            await link.open()
        routers = [MiniRouter(b.address, links[0]), MiniRouter(a.address, links[1])]
        writers = [b.info().ref, a.info().ref]
        specs = [make_spec("into-a"), make_spec("into-b")]
        leases = [
            await router.reserve(spec, writer)
            for router, spec, writer in zip(routers, specs, writers, strict=True)
        ]
        # Each fills one worker, and is computed by the other.
        handing_off = [
            asyncio.create_task(router.hand_off(spec, lease))
            for router, spec, lease in zip(routers, specs, leases, strict=True)
        ]
        heard = [link.of(spec.request_id) for link, spec in zip(links, specs, strict=True)]
        for link, told in zip(links, heard, strict=True):
            await link.until(lambda told=told: told.rejected or told.finished)
        assert any(told.rejected for told in heard)
        await asyncio.wait(handing_off)
        await nothing_held(a, b)
        for router, writer, name in zip(routers, writers, ("again-a", "again-b"), strict=True):
            assert await router.generate(make_spec(name), writer)
        for each in (*routers, *links):
            await each.close()
