"""Prompts that wait: behind a long or hung step, or for each other on two full workers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from baton.config.engine import FakeEngineConfig
from baton.config.transfer import TransferConfig
from baton.config.workers import RegistryConfig
from baton.fleet import Role
from tests.cluster.conftest import (
    ENGINE,
    HeldStep,
    make_spec,
    nothing_held,
    running_worker,
    until,
)
from tests.decode_worker.links import paired, routed

TIMED = replace(ENGINE, fake=FakeEngineConfig(window=20, vocab_size=50_000, prefill_token_s=0.0001))
QUICK = TransferConfig(transport="memory", renew_within_s=1.0, ack_timeout_s=1.0)
PATIENT = RegistryConfig(stuck_after_s=60.0)
IMPATIENT = RegistryConfig(stuck_after_s=0.2, stuck_factor=1.0)


@pytest.mark.parametrize("judge", [PATIENT, IMPATIENT], ids=["long", "hung"])
async def test_a_prompt_behind_a_long_step_is_handed_over_and_one_behind_a_hung_step_is_given_up(
    judge: RegistryConfig,
) -> None:
    options = {"engine": TIMED, "registry": judge, "transfer": QUICK}
    async with paired(options, {"transfer": QUICK}) as pair:
        prefill, link, router, writer = pair.prefill, pair.link, pair.router, pair.writer
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


ONE_PROMPT = replace(ENGINE, num_blocks=10)
JUDGE = RegistryConfig(stuck_after_s=0.2)


async def test_two_full_workers_whose_prompts_wait_for_each_other_give_their_leases_up() -> None:
    async with (
        running_worker("a", Role.MIXED, ONE_PROMPT, registry=JUDGE, transfer=QUICK) as a,
        running_worker("b", Role.MIXED, ONE_PROMPT, registry=JUDGE, transfer=QUICK) as b,
        routed(b, a) as into_a,
        routed(a, b) as into_b,
    ):
        # Each fills one worker, and is computed by the other.
        filled = [(into_a, make_spec("into-a")), (into_b, make_spec("into-b"))]
        leases = [await pair.router.reserve(spec, pair.writer) for pair, spec in filled]
        handing_off = [
            asyncio.create_task(pair.router.hand_off(spec, lease))
            for (pair, spec), lease in zip(filled, leases, strict=True)
        ]
        heard = [pair.link.of(spec.request_id) for pair, spec in filled]
        for pair, one in zip((into_a, into_b), heard, strict=True):
            await pair.link.until(lambda one=one: one.rejected or one.finished)
        assert any(one.rejected for one in heard)
        await asyncio.wait(handing_off)
        await nothing_held(a, b)
        for pair in (into_a, into_b):
            assert await pair.router.generate(make_spec("again"), pair.writer)
