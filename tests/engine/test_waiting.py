"""Requests that wait for blocks: what reservations leave them, and what they hold up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.request import (
    NoCapacityEvent,
    RequestId,
    RequestSpec,
    ReservedEvent,
    SampledToken,
    TokenEvent,
)
from engine.run.core import EngineCore
from tests.engine.fakes import (
    GREEDY,
    FakeEngine,
    Streams,
    drain,
    fake_config,
    pair,
    pool_is_whole,
    prompt,
    reserve,
    spec_of,
)
from tests.engine.watching import watched


def test_reservations_leave_the_place_and_the_blocks_that_the_first_waiting_request_needs() -> None:
    core, _ = watched(64, max_num_batched_tokens=512, max_num_seqs=8)
    streams, reserved, step, num_done = Streams(), 0, 0, 0
    ready: list[tuple[int, RequestSpec]] = []  # reserved, and in which step they are admitted

    def reserve_what_goes() -> None:
        nonlocal reserved
        spec = spec_of(
            f"small-{reserved}", prompt(64, 100 + reserved), replace(GREEDY, max_tokens=40)
        )
        if isinstance(reserve(core, spec), ReservedEvent):
            ready.append((step + 3, spec))
            reserved += 1

    for step in range(600):
        if step == 50:
            core.add(spec_of("long", prompt(700, 9)))
            core.add(spec_of("short", prompt(20, 10)))
        reserve_what_goes()
        while ready and ready[0][0] <= step:
            core.admit(ready.pop(0)[1].request_id, SampledToken(5))
        if core.has_work():
            for event in core.step():
                if isinstance(event, TokenEvent) and event.finished is not None:
                    num_done += 1
                    streams.finished[event.request_id] = event.finished
    assert {"long", "short"} <= set(streams.finished)
    assert num_done > 30  # the others go on


def test_a_prompt_that_quarantine_leaves_no_room_for_holds_up_no_other() -> None:
    core, _ = watched(num_blocks=64)
    reserve(core, spec_of("lost", prompt(320)))
    core.abort(RequestId("lost"))  # 20 blocks until its writer has stopped
    core.add(spec_of("large", prompt(800, 1)))
    core.add(spec_of("small", prompt(10, 2)))
    streams = drain(core)
    assert set(streams.finished) == {"small"}
    assert isinstance(reserve(core, spec_of("handed over", prompt(10, 3))), ReservedEvent)
    core.release(RequestId("handed over"))
    core.release(RequestId("lost"))
    drain(core, streams)
    assert set(streams.finished) == {"small", "large"}
    pool_is_whole(core)


def test_a_prompt_that_waits_for_blocks_starts_when_another_has_computed_what_it_lacks() -> None:
    core, seen = watched(num_blocks=64, max_num_batched_tokens=700)
    core.add(spec_of("first", prompt(640, 1, shared=620)))
    core.add(spec_of("second", prompt(640, 2, shared=620)))
    streams = drain(core)
    assert len(streams.finished) == 2
    together = [plan for plan in seen.plans if len(plan.seqs) == 2]
    assert len(together) > 10
    pool_is_whole(core)


def test_an_idle_engine_is_not_blocked_by_its_next_request() -> None:
    engine = FakeEngine(fake_config(num_blocks=21))
    core = EngineCore(engine.config, engine.core._runner, engine.sink, clock=lambda: 5.0)
    reserve(core, spec_of("held", prompt(160)))
    core.step()
    core.admit(RequestId("held"), SampledToken(7))
    assert core.health.blocked_since is None
    core.abort(RequestId("held"))
    pool_is_whole(core)


def test_an_engine_is_blocked_from_when_no_request_could_start_until_one_does() -> None:
    now = 5.0
    engine = FakeEngine(fake_config(num_blocks=21))
    core = EngineCore(engine.config, engine.core._runner, engine.sink, clock=lambda: now)
    reserve(core, spec_of("held", prompt(160)))
    core.step()
    assert core.health.blocked_since is None  # no request waits
    core.add(spec_of("waits", prompt(260, 1)))
    core.step()
    now = 6.0
    core.add(spec_of("later", prompt(260, 2)))
    core.step()
    assert core.health.blocked_since == 5.0
    for name in ("waits", "later"):
        core.abort(RequestId(name))
    core.step()  # tells of their ends
    assert core.health.blocked_since is None
    now = 7.0
    core.add(spec_of("next", prompt(260, 3)))
    assert core.health.blocked_since is None
    core.step()
    assert core.health.blocked_since == 7.0
    core.release(RequestId("held"))
    core.step()  # tells of its end
    core.step()
    assert core.health.blocked_since is None
    core.abort(RequestId("next"))
    pool_is_whole(core)


def late_reader() -> EngineCore:
    """An engine of 20 blocks, 10 of which a released prefill's late reader may still read."""
    sender, _, wire = pair(fake_config(num_blocks=21), fake_config())
    core, export = sender.core, spec_of("export", prompt(160))
    core.add_prefill(export, wire.open(ReservedEvent(export.request_id, 0, ())), 0)
    wire.leases.clear()
    drain(core)
    core.abort(export.request_id)
    return core


def test_a_prompt_that_a_late_readers_blocks_leave_no_room_for_holds_up_no_other() -> None:
    core = late_reader()
    core.add(spec_of("large", prompt(200, 1)))
    core.add(spec_of("small", prompt(10, 2)))
    streams = drain(core)
    assert set(streams.finished) == {"small"}
    assert isinstance(reserve(core, spec_of("handed over", prompt(10, 3))), ReservedEvent)
    core.release(RequestId("handed over"))
    shares = spec_of("shares", np.concatenate([prompt(160), prompt(100, 4)]))
    core.add(shares)  # more than is left, but most of it is there
    drain(core, streams)
    assert set(streams.finished) == {"small", "shares"}
    core.release(RequestId("export"))
    drain(core, streams)
    assert set(streams.finished) == {"small", "shares", "large"}
    pool_is_whole(core)


def test_a_prompt_that_shares_what_a_late_reader_holds_is_not_passed_by() -> None:
    core = late_reader()
    reserve(core, spec_of("held", prompt(128, 1)))
    core.add(spec_of("shares", np.concatenate([prompt(160), prompt(100, 4)])))  # lacks 7 of 17
    core.add(spec_of("small", prompt(10, 2)))
    streams = drain(core)
    assert not streams.finished
    assert isinstance(reserve(core, spec_of("newcomer", prompt(10, 3))), NoCapacityEvent)
    core.release(RequestId("held"))
    drain(core, streams)
    assert set(streams.finished) == {"small", "shares"}
    core.release(RequestId("export"))
    pool_is_whole(core)


def test_a_reservation_goes_before_a_waiting_request_of_higher_priority_only() -> None:
    core, _ = watched(num_blocks=21)
    reserve(core, spec_of("held", prompt(160)))
    core.add(spec_of("waits", prompt(200, 1)))
    assert isinstance(reserve(core, spec_of("equal", prompt(10))), NoCapacityEvent)
    assert isinstance(reserve(core, spec_of("urgent", prompt(10), priority=-1)), ReservedEvent)
    for name in ("held", "urgent"):
        core.release(RequestId(name))
    assert set(drain(core).finished) == {"waits"}
    pool_is_whole(core)


@pytest.mark.parametrize("num_running", [0, 1])
def test_a_reservation_leaves_who_waits_its_blocks_and_counts_those_that_both_hold_once(
    num_running: int,
) -> None:
    # 10 blocks are cached; both prompts have them and lack 2, what runs holds 1 and may want 1.
    just_enough = 10 + 2 + 2 + 2 * num_running
    for num_blocks, granted in ((just_enough, True), (just_enough - 1, False)):
        core, seen = watched(num_blocks=num_blocks + 1, num_regions=1)
        once = replace(GREEDY, max_tokens=1)
        core.add(spec_of("before", prompt(160, shared=160), once))
        streams = drain(core)
        for n in range(num_running):
            core.add(spec_of(f"runs {n}", prompt(10, n), replace(GREEDY, max_tokens=3)))
            streams.take(core.step())
        core.add(spec_of("waits", prompt(190, 1, shared=160), once))
        answer = reserve(core, spec_of("comes", prompt(190, 2, shared=160), once))
        assert isinstance(answer, ReservedEvent if granted else NoCapacityEvent), answer
        assert isinstance(reserve(core, spec_of("other", prompt(190, 3), once)), NoCapacityEvent)
        streams.take(core.step())
        assert "waits" in [seq.request_id for seq in seen.plans[-1].seqs]
        drain(core, streams)
        assert len(streams.finished) == 2 + num_running
        core.release(RequestId("comes"))
        pool_is_whole(core)
