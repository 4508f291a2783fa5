"""Makes the modules beside it importable, here and in the processes that the tests start."""

import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from handoff_pairs import CONFIGS, HERE, THERE, AnySide, MakePair, fits_here, local
from manual_world import CONFIG, World
from transfer_sides import RemoteSide, SideSpec

from baton.config.transfer import TransferConfig


@pytest.fixture(params=["memory", "ucx"])
def config(request: pytest.FixtureRequest) -> TransferConfig:
    return CONFIGS[request.param]


@pytest.fixture
async def make_pair() -> AsyncIterator[MakePair]:
    """Makes (sender, receiver), both filled, the sender in its own process when UCX moves bytes."""
    sides: list[AnySide] = []

    async def make(
        config: TransferConfig, sender_tp: int = 1, receiver_tp: int = 1, **spec: Any
    ) -> tuple[AnySide, AnySide]:
        sender_spec = SideSpec("sender", sender_tp, config=config, **spec)
        receiver_spec = SideSpec("receiver", receiver_tp, config=config, **spec)
        sender: AnySide = (
            RemoteSide(sender_spec, "forkserver")
            if config.transport == "ucx"
            else local(sender_spec)
        )
        sides.append(sender)
        receiver: AnySide = (
            local(receiver_spec) if fits_here(config) else RemoteSide(receiver_spec, "forkserver")
        )
        sides.append(receiver)
        for side, seeds in ((sender, HERE), (receiver, THERE)):
            await side.call("ready")
            await side.call("fill", seeds)
        return sender, receiver

    yield make
    for side in sides:
        if not isinstance(side, RemoteSide) or side.process.is_alive():
            await side.call("check_integrity")
        await side.close()


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """One rank on either side; at the end nothing is left of any handoff, nor in quarantine.

    Its parameter, if any, is the `ack_timeout_s`.
    """
    config = replace(CONFIG, ack_timeout_s=getattr(request, "param", CONFIG.ack_timeout_s))
    world = World(config=config)
    yield world
    await world.settle()
    await world.advance(20)
    await world.settle()
    await world.advance(2)
    for side in (world.sender, world.receiver):
        if side.spec.worker_id not in world.dead:
            side.check_integrity()
            assert side.leftovers() == (0, 0, 0), side.spec.worker_id
    if "receiver" not in world.dead:
        assert world.receiver.table.num_quarantined_blocks == 0
