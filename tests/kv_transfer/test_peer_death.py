"""Peers that die or stop, over shared memory and over TCP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from handoff_pairs import needs_system_ucx
from transfer_sides import LocalSide, RemoteSide, Side, SideSpec

from baton.config.transfer import TransferConfig
from kv_transfer.errors import HandoffError
from kv_transfer.lease_table import LeaseFailure
from kv_transfer.process import ProcessIdentity, is_gone
from kv_transfer.transports.by_name import make_transport

CONFIG = TransferConfig(keepalive_s=0.5)


class Polls:
    """Asks whether a process is gone, and counts how often it was asked."""

    def __init__(self) -> None:
        self._num_asked = 0
        self._asked = asyncio.Event()

    def __call__(self, identity: ProcessIdentity) -> bool | None:
        self._num_asked += 1
        self._asked.set()
        return is_gone(identity)

    async def some(self, count: int) -> None:
        """Return when asked `count` times."""
        async with asyncio.timeout(10):
            while self._num_asked < count:
                self._asked.clear()
                await self._asked.wait()


@pytest.fixture
async def polls() -> Polls:
    return Polls()


@pytest.fixture
async def here(request: pytest.FixtureRequest, polls: Polls) -> AsyncIterator[LocalSide]:
    """Its parameter, if any, is the `ack_timeout_s`."""
    config = replace(CONFIG, ack_timeout_s=getattr(request, "param", CONFIG.ack_timeout_s))
    spec = SideSpec("here", config=config)
    side = LocalSide(Side(spec, [make_transport(CONFIG)], process_is_gone=polls))
    yield side
    await side.call("check_integrity")
    await side.close()


@pytest.fixture
async def there() -> AsyncIterator[RemoteSide]:
    side = RemoteSide(SideSpec("there", config=CONFIG))
    await side.call("ready")
    yield side
    side.kill()
    side.reap()
    await side.close()


async def test_a_sender_killed_in_mid_push_leaves_its_blocks_in_quarantine_until_it_is_reaped(
    here: LocalSide, there: RemoteSide
) -> None:
    lease = await here.call("grant", "r", await there.call("ready"), [[1, 2], [1, 2]])
    handoff = await there.call("open", lease)
    await there.call("push", handoff, 0, [0, 1], [3, 4])
    there.kill()
    there.reap()
    failed = await here.call("wait_for", "failed", "r")
    assert failed[2] is LeaseFailure.WRITER_LOST
    await here.call("wait_for", "quiescent", "r")
    assert here.side.table.num_quarantined_blocks == 0
    assert await here.call("leftovers") == (0, 0, 0)


async def test_a_stopped_sender_keeps_its_blocks_in_quarantine_as_long_as_it_might_wake(
    here: LocalSide, there: RemoteSide, polls: Polls
) -> None:
    lease = await here.call("grant", "r", await there.call("ready"), [[1, 2], [1, 2]])
    await there.call("open", lease)
    pid = there.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await here.call("release", lease.lease_id)
    await polls.some(4)  # silence proves nothing
    assert here.side.table.num_quarantined_blocks == 4
    assert here.side.event_names() == []
    there.kill()
    there.reap()
    await here.call("wait_for", "quiescent", "r")


async def test_a_receiver_killed_in_mid_push_ends_in_peer_lost_before_the_timeout(
    here: LocalSide, there: RemoteSide
) -> None:
    lease = await there.call("grant", "r", await here.call("ready"), [[1, 2], [1, 2]])
    handoff = await here.call("open", lease)
    await here.call("push", handoff, 0, [0, 1], [3, 4])
    await here.call("flush", lease)  # killed sooner, it could not be mapped here
    there.kill()
    there.reap()
    await here.call("push", handoff, 1, [0, 1], [3, 4])  # into memory that nobody reads any more
    began_s = time.monotonic()
    with pytest.raises(HandoffError, match="PEER_LOST"):
        await here.call("finish", handoff)
    assert time.monotonic() - began_s < 5
    assert await here.call("leftovers") == (0, 0, 0)


@pytest.mark.parametrize("here", [1.0], indirect=True)
@pytest.mark.parametrize("is_reaped", [False, True])
async def test_a_dead_receiver_ends_in_a_typed_error_in_time(
    here: LocalSide, there: RemoteSide, is_reaped: bool
) -> None:
    lease = await there.call("grant", "r", await here.call("ready"), [[1], [1]])
    if is_reaped:
        there.kill()
        there.reap()
    handoff = await here.call("open", lease)
    there.kill()
    for group in (0, 1):
        await here.call("push", handoff, group, [0], [3])
    began_s = time.monotonic()
    # A failed post: its memory went before it was mapped here.
    with pytest.raises(HandoffError, match=r"TIMEOUT|PEER_LOST|POST_FAILED"):
        await here.call("finish", handoff)
    assert time.monotonic() - began_s < 5
    assert await here.call("leftovers") == (0, 0, 0)


async def test_a_receiver_that_is_stopped_before_its_first_answer_holds_none_of_the_senders_blocks(
    there: RemoteSide,
) -> None:
    """UCX holds messages until the first answer. Puts need none: they are the sender's own."""
    config = replace(CONFIG, ack_timeout_s=0.5)
    here = LocalSide(Side(SideSpec("here", config=config), [make_transport(config)]))
    lease = await there.call("grant", "r", await here.call("ready"), [[1], [1]])
    pid = there.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    handoff = await here.call("open", lease)
    for group in (0, 1):
        await here.call("push", handoff, group, [0], [3])
    with pytest.raises(HandoffError, match="TIMEOUT"):
        await here.call("finish", handoff)
    await asyncio.wait_for(here.side.exporter.wait_drained(handoff), 10)
    assert await here.call("leftovers") == (0, 0, 0)
    await here.close()


async def test_a_worker_that_has_lost_one_peer_serves_the_next(
    here: LocalSide, there: RemoteSide
) -> None:
    lease = await here.call("grant", "r", await there.call("ready"), [[1], [1]])
    await there.call("open", lease)
    there.kill()
    there.reap()
    await here.call("wait_for", "quiescent", "r")
    other = RemoteSide(SideSpec("other", config=CONFIG))
    try:
        lease = await here.call("grant", "again", await other.call("ready"), [[1], [1]])
        handoff = await other.call("open", lease)
        for group in (0, 1):
            await other.call("push", handoff, group, [0], [3])
        assert (await other.call("finish", handoff)).num_blocks == 2
    finally:
        await other.close()


def over_tcp(check: str, ucx_library: str = "wheel") -> dict[str, Any]:
    """Run one check of `over_tcp.py` with nothing but TCP on the loopback device."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("over_tcp.py")), check, ucx_library],
        env={**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer


def test_a_flush_to_a_lost_peer_answers_only_when_its_connection_is_closed() -> None:
    found = over_tcp("flush")
    assert found["working"] == [False, None]
    for is_closed, error in found["answers"]:
        assert error is not None
        assert is_closed, found


def test_connections_that_come_and_go_leave_nothing_behind() -> None:
    found = over_tcp("connections")
    assert found["last"] == found["first"]


@pytest.mark.parametrize("ucx_library", ["wheel", pytest.param("system", marks=needs_system_ucx)])
def test_bytes_that_wait_in_a_socket_never_land_once_puts_are_revoked(ucx_library: str) -> None:
    found = over_tcp("revoked", ucx_library)
    assert found["num_unread_bytes"] > 1000
    error, has_landed = found["former"]
    assert error is not None
    assert not has_landed
    assert found["fresh"] == [None, True]
