"""Turns of the loop, and room for connections."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket

import pytest

from router.door.connections.acceptor import Acceptor, listening
from router.door.connections.sharing import Sharing, Turns


class Served(asyncio.Protocol):
    """A guest that is never idle."""

    arriving: asyncio.Task[None] | None = None

    def __init__(self) -> None:
        self.num_looks = 0

    @property
    def is_idle(self) -> bool:
        self.num_looks += 1
        return False

    def leave(self) -> None:
        raise AssertionError("it is not idle")


async def test_those_with_much_to_read_take_turns_and_others_work_between_the_rounds() -> None:
    done, left = list[str](), {"a": 4, "b": 4, "c": 1}
    turns = Turns(lambda: 0.003 * len(done))  # s a piece; 0.004 s a round

    def turn(name: str) -> bool:
        done.append(name)
        left[name] -= 1
        return left[name] > 0

    for name in "abc":
        turns.take(lambda own=name: turn(own))
    rounds = []
    while any(left.values()):
        before = len(done)
        await asyncio.sleep(0)
        rounds.append(len(done) - before)
    assert "".join(done) == "aabcababb"
    assert max(rounds) <= 2


async def refused(sharing: Sharing, num_clients: int) -> None:
    """They come at once, and all of them are cut off."""
    listener = listening("127.0.0.1", 0, False)
    acceptor = Acceptor(listener, sharing, Served)
    clients = [socket.create_connection(listener.getsockname()) for _ in range(num_clients)]
    acceptor.start()
    for client in clients:
        client.setblocking(False)
        with contextlib.suppress(ConnectionResetError):
            assert not await asyncio.get_running_loop().sock_recv(client, 1)
        client.close()
    await acceptor.stop()


async def test_that_all_are_served_is_found_once_for_many_that_come() -> None:
    sharing, guests = Sharing(10, 1), [Served() for _ in range(10)]
    assert all(sharing.admit(guest) for guest in guests)
    await refused(sharing, 100)
    assert guests[0].num_looks <= 2


async def test_connections_leave_files_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (264, 264))
    for files_each, num_taken in ((1, 8), (2, 4)):
        sharing = Sharing(100, 1, files_each)
        assert sum(sharing.admit(Served()) for _ in range(10)) == num_taken
    sharing = Sharing(100, 1)
    sharing.max_file = 0
    await refused(sharing, 10)
    assert not sharing._guests
