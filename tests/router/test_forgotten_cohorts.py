"""A stream that comes back to a router that does not know, or not any more, what its cohort's text
is."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
import pytest

from baton.errors import UnavailableError
from router.cohort_texts import OWN, CohortTexts, TextId
from router.resume import text_of_stream
from router.text import TextModel
from tests.router.deployment import PROMPT, ask_for, byte_model, error_reason
from tests.router.test_cohort_streams import WORKERS, die, name_drawn
from tests.router.test_cohort_texts import SHIFTS, read, tell, two_texts


@pytest.mark.parametrize("has_read", [True, False], ids=["forgotten", "never known"])
async def test_a_stream_that_the_router_s_text_refuses_and_whose_cohort_has_gone_is_not_resumable(
    text_model: TextModel, tmp_path: Path, has_read: bool
) -> None:
    byte_model(tmp_path, SHIFTS["new"])
    (tmp_path / "config.json").write_text('{"vocab_size": 1000}')
    async with two_texts(text_model, tmp_path) as d:
        if has_read:
            second = await d.add_router()
            await d.connected(6, d.servers[1].router)
            await read(d, 1)
        request = ask_for(PROMPT, 40, request_id=name_drawn("new"), stop_token_ids=[500])
        seen = await d.client.ask(request, until=lambda answer: len(answer.ids) >= 3)
        await d.servers.pop(0).stop(0.0)
        await tell(d, tmp_path, old=1)
        for name in WORKERS:
            await die(d, f"new-{name}")
        if not has_read:
            second = await d.add_router()
            await d.connected(3)
        await d.until(lambda: d.router.fleet.texts.is_only(OWN))
        request.resume_from_index, request.cohort = len(seen.ids), "new"
        request.model_fingerprints[:] = seen.routed[0].model_fingerprints
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await second.ask(request)
        assert error_reason(refused.value) == "NOT_RESUMABLE"
        d.registry.settles = True
        await d.registry.publish()
        await d.until(lambda: d.router.fleet.stopped.settles)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await second.ask(request)
        assert error_reason(refused.value) == "UNAVAILABLE", "its cohort may be told of yet"


def test_a_stream_keeps_the_text_that_it_is_read_with_while_its_cohort_is_not_told_of() -> None:
    texts, other = CohortTexts(), TextId(1)
    assert text_of_stream("new", texts, other) == other
    texts.update({"old": OWN}, {})
    assert text_of_stream("new", texts, other) == other
    assert text_of_stream("old", texts, other) == OWN
    texts.update({"old": OWN, "new": None}, {})
    with pytest.raises(UnavailableError):
        text_of_stream("new", texts, other)
