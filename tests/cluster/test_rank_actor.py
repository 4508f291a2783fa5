"""A rank's actor without Ray around it."""

from __future__ import annotations

import socket

import pytest

from cluster.worker.process import RankActor


def test_nobody_else_can_take_the_port_at_which_the_ranks_of_a_replica_meet() -> None:
    """A second replica that starts just now would meet at the same one, and mix ranks up."""
    actor = RankActor()
    port = actor.listen("127.0.0.1")
    try:
        with pytest.raises(OSError, match="in use"), socket.create_server(("127.0.0.1", port)):
            pass
    finally:
        # Without a launch nothing else closes the socket.
        assert actor._meeting is not None
        actor._meeting.close()
