"""Prompts that wait: behind a long or hung step, or for each other on two full workers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from baton.config.engine import FakeEngineConfig
from baton.config.transfer import TransferConfig
from baton.config.workers import RegistryConfig
from cluster.pools.role_plan import Role
from tests.cluster.conftest import (
    ENGINE,
    DecodeLink,
    HeldStep,
    MiniRouter,
    make_spec,
    nothing_held,
    running_worker,
    until,
)

TIMED = replace(ENGINE, fake=FakeEngineConfig(window=20, vocab_size=50_000, prefill_token_s=0.0001))
QUICK = TransferConfig(transport="memory", renew_within_s=1.0, ack_timeout_s=1.0)
PATIENT = RegistryConfig(stuck_after_s=60.0)
IMPATIENT = RegistryConfig(stuck_after_s=0.2, stuck_factor=1.0)


@pytest.mark.parametrize("judge", [PATIENT, IMPATIENT], ids=["long", "hung"])
async def test_a_prompt_behind_a_long_step_is_handed_over_and_one_behind_a_hung_step_is_given_up(
    judge: RegistryConfig,
) -> None:
    async with (
        running_worker("prefill-0", Role.PREFILL, TIMED, registry=judge, transfer=QUICK) as prefill,
        running_worker("decode-0", Role.DECODE, transfer=QUICK) as decode,
    ):
        link = DecodeLink(decode.address, "router-a")
        await link.open()
        router, writer = MiniRouter(prefill.address, link), prefill.info().ref
        await router.generate(make_spec("measured"), writer)  # steps are predicted from now on
        step = HeldStep(prefill)
        first = asyncio.create_task(router.generate(make_spec("first"), writer))
        await until(step.begun.is_set)
        begun_at = time.monotonic()
        second = make_spec("second")
        lease = await router.reserve(second, writer)
        handing_off = asyncio.create_task(router.hand_off(second, lease))
        heard = link.of("second")
        lasts_s = 2 * lease.renew_within_ms / 1000
        try:
            if judge is IMPATIENT:
                await link.until(lambda: heard.rejected)
                assert heard.rejected is not None
                assert "the writer did not renew the lease" in heard.rejected.message
            else:
                await until(lambda: heard.rejected or time.monotonic() - begun_at > lasts_s)
                assert heard.rejected is None
        finally:
            step.go_on.set()
        await asyncio.wait({first, handing_off})
        if judge is PATIENT:
            await link.until(lambda: heard.finished)
            assert first.result()
        await router.close()
        await link.close()


ONE_PROMPT = replace(ENGINE, num_blocks=10)
JUDGE = RegistryConfig(stuck_after_s=0.2)


async def test_two_full_workers_whose_prompts_wait_for_each_other_give_their_leases_up() -> None:
    async with (
        running_worker("a", Role.MIXED, ONE_PROMPT, registry=JUDGE, transfer=QUICK) as a,
        running_worker("b", Role.MIXED, ONE_PROMPT, registry=JUDGE, transfer=QUICK) as b,
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
        for link, one in zip(links, heard, strict=True):
            await link.until(lambda one=one: one.rejected or one.finished)
        assert any(one.rejected for one in heard)
        await asyncio.wait(handing_off)
        await nothing_held(a, b)
        for router, writer, name in zip(routers, writers, ("again-a", "again-b"), strict=True):
            assert await router.generate(make_spec(name), writer)
        for each in (*routers, *links):
            await each.close()
