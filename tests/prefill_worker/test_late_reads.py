"""A handoff that is given up before it has drained: its source blocks may still be read."""

from __future__ import annotations

import asyncio

import pytest

from cluster.pools.role_plan import Role
from kv_transfer.memory_transport import MemoryNetwork, Operation, ThreadScheduler
from tests.cluster.conftest import (
    DecodeLink,
    MiniRouter,
    load_of,
    make_spec,
    nothing_held,
    running_worker,
    until,
)


class HeldPuts(ThreadScheduler):
    """Keeps puts and flushes while `holds`; everything else runs."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = True
        self.held: list[Operation] = []

    def schedule(self, operation: Operation) -> None:
        if self.holds and operation.kind in ("put", "flush"):
            self.held.append(operation)
        else:
            super().schedule(operation)

    def go_on(self) -> None:
        for operation in self.held:
            self.schedule(operation)


async def test_blocks_that_a_put_may_still_read_are_not_free_until_it_has_drained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    puts = HeldPuts()
    monkeypatch.setattr(MemoryNetwork, "_shared", MemoryNetwork(puts))
    async with (
        running_worker("prefill-0", Role.PREFILL) as prefill,
        running_worker("decode-0", Role.DECODE) as decode,
    ):
        link = DecodeLink(decode.address, "router-a")
        await link.open()
        router = MiniRouter(prefill.address, link)
        spec = make_spec("stuck", 60)
        lease = await router.reserve(spec, prefill.info().ref)
        handing_off = asyncio.create_task(router.hand_off(spec, lease))
        await until(lambda: puts.held)
        await link.cancel("stuck")
        await until(lambda: "not every rank has drained" in caplog.text)
        assert (await handing_off)[-1].handoff_failed.reason == "FENCED"
        puts.holds = False
        # Another prompt comes and goes: whatever was to be let go of has been.
        other = make_spec("other", 7)
        other.sampling.max_tokens = 1
        responses = await router.hand_off(other, await router.reserve(other, prefill.info().ref))
        assert responses[-1].first_token.finished
        load = await load_of(prefill)
        assert load.num_blocks - load.num_free_blocks >= 7
        assert not prefill.prefill.is_idle
        puts.go_on()
        await link.cancel("other")
        await nothing_held(prefill, decode)
        role = prefill.prefill
        await until(lambda: role.is_idle)
        await router.close()
        await link.close()
