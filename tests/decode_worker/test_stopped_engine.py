"""What a decode worker answers between its engine's end and its own."""

from __future__ import annotations

import pytest

from baton.v1 import worker_pb2
from cluster.pools.role_plan import Role
from engine.api import Engine
from tests.cluster.conftest import DecodeLink, make_spec, running_worker, until


async def test_a_worker_whose_engine_has_stopped_takes_nothing_more_and_blames_no_request() -> None:
    def fail(_: Engine) -> None:
        raise RuntimeError("the device is gone")

    async def ask_after_the_failure() -> None:
        async with running_worker("decode-0", Role.DECODE) as worker:
            link = DecodeLink(worker.address, "router-a/1")
            await link.open()
            await until(lambda: worker.decode._sessions)
            worker.engine.post(fail)
            await link.reserve(make_spec("x"))
            await link.until(lambda: link.of("x").rejected)
            told.append(link.of("x").rejected)
            await link.close()

    told: list[worker_pb2.Rejected | None] = []
    with pytest.raises(RuntimeError, match="the device is gone"):
        await ask_after_the_failure()
    assert [rejected and rejected.reason for rejected in told] == [
        worker_pb2.REJECT_REASON_DRAINING
    ]
