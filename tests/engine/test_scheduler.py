"""Who runs when: budget, order, limits, preemption, and what is refused at the door."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.core import EngineCore
from engine.errors import InvalidRequestError
from engine.request import (
    FinishedEvent,
    FinishReason,
    HandoffId,
    NoCapacityEvent,
    RequestId,
    RequestSpec,
    ReservedEvent,
    SampledToken,
    SamplingParams,
    StepPlan,
    TokenEvent,
)
from tests.engine.fakes import (
    GREEDY,
    FakeEngine,
    Streams,
    alone,
    drain,
    fake_config,
    pair,
    pool_is_whole,
    prefilled,
    prompt,
    spec_of,
)


class Watched:
    """Remembers the plans of an engine's runner."""

    def __init__(self, engine: FakeEngine) -> None:
        self.plans: list[StepPlan] = []
        runner = engine.core._runner
        run = runner.run

        def remember(plan: StepPlan, specs: dict[RequestId, RequestSpec]) -> list[SampledToken]:
            self.plans.append(plan)
            return run(plan, specs)

        runner.run = remember  # type: ignore[method-assign]

    def last(self) -> list[tuple[str, int, bool]]:
        """(request, tokens, samples) of the last step."""
        return [(s.request_id, len(s.token_ids), s.samples) for s in self.plans[-1].seqs]


def watched(num_blocks: int = 400, **changes: object) -> tuple[EngineCore, Watched]:
    engine = FakeEngine(fake_config(num_blocks, **changes))
    return engine.core, Watched(engine)


def test_decodes_come_first_and_prompts_fill_the_rest_of_the_budget() -> None:
    core, seen = watched(max_num_batched_tokens=20)
    core.add(spec_of("a", prompt(10)))
    core.add(spec_of("b", prompt(30)))
    core.step()
    assert seen.last() == [("a", 10, True), ("b", 10, False)]
    core.step()
    assert seen.last() == [("a", 1, True), ("b", 19, False)]
    core.step()
    assert seen.last() == [("a", 1, True), ("b", 1, True)]
    assert seen.plans[0].num_tokens == 20
    assert [s.start for s in seen.plans[1].seqs] == [10, 10]


def test_a_budget_of_a_token_for_each_running_request_starves_neither_prompts_nor_decodes() -> None:
    core, seen = watched(max_num_batched_tokens=4, max_num_seqs=4)
    specs = [spec_of(str(n), prompt(n + 1), replace(GREEDY, max_tokens=5)) for n in range(10)]
    for spec in specs:
        core.add(spec)
    streams = Streams()
    while core.has_work():
        running = {r.request_id for r in core._scheduler._running if r.decodes}
        streams.take(core.step())
        assert running <= {s.request_id for s in seen.plans[-1].seqs}
    assert max(plan.num_tokens for plan in seen.plans) == 4
    for spec in specs:
        assert streams.tokens[spec.request_id] == alone(spec)


def test_a_budget_below_a_token_for_each_running_request_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens .* max_num_seqs \(5\), not 4"):
        fake_config(max_num_batched_tokens=4, max_num_seqs=5)


def test_no_more_requests_run_at_once_than_allowed_reservations_included() -> None:
    core, seen = watched(max_num_seqs=3)
    assert isinstance(core.reserve(spec_of("reserved", prompt(10))), ReservedEvent)
    for n in range(5):
        core.add(spec_of(str(n), prompt(10, n)))
    streams = drain(core)
    assert max(len(plan.seqs) for plan in seen.plans) == 2
    assert len(streams.finished) == 5
    core.release(RequestId("reserved"))
    for n in range(3):
        assert isinstance(core.reserve(spec_of(f"r{n}", prompt(10))), ReservedEvent)
    assert isinstance(core.reserve(spec_of("r3", prompt(10))), NoCapacityEvent)


def test_higher_priority_then_earlier_arrival_goes_first() -> None:
    core, seen = watched(max_num_seqs=1)
    for name, priority in (("low", -1), ("first", 0), ("second", 0), ("high", 5)):
        spec = spec_of(name, prompt(5), replace(GREEDY, max_tokens=1), priority=priority)
        core.add(spec)
    drain(core)
    order = [plan.seqs[0].request_id for plan in seen.plans]
    assert order == ["high", "first", "second", "low"]


def test_the_newest_request_is_preempted_and_the_oldest_never_waits() -> None:
    core, seen = watched(num_blocks=12, max_num_seqs=4)
    sampling = replace(GREEDY, max_tokens=100)
    for name in ("old", "new"):
        core.add(spec_of(name, prompt(60, len(name) + ord(name[0])), sampling))
    streams = drain(core)
    old = [any(s.request_id == "old" for s in plan.seqs) for plan in seen.plans]
    assert all(old[: old.index(False)])
    assert not any(old[old.index(False) :])
    restarts = [s for plan in seen.plans for s in plan.seqs if s.request_id == "new" and s.samples]
    assert len(restarts) == 100  # every index sampled once
    recomputed = sum(len(s.token_ids) for p in seen.plans for s in p.seqs if s.request_id == "new")
    assert recomputed > 60 + 99
    assert len(streams.tokens["new"]) == 100
    pool_is_whole(core)


def test_reserved_and_exported_requests_are_never_preempted() -> None:
    config = fake_config(num_blocks=21)
    sender, receiver, wire = pair(config, fake_config())
    lease = receiver.core.reserve(spec_of("export", prompt(60)))
    assert isinstance(lease, ReservedEvent)
    sender.core.add_prefill(spec_of("export", prompt(60)), wire.open(lease), 0)
    sender.core.step()
    reserved = sender.core.reserve(spec_of("reserved", prompt(60, 1)))
    assert isinstance(reserved, ReservedEvent)
    local = spec_of("local", prompt(60, 2), replace(GREEDY, max_tokens=200))
    sender.core.add(local)
    streams = drain(sender.core)  # until it finds no block: 4 + 4 of 20 are not to be had
    assert 60 < len(streams.tokens["local"]) + 60 < 260
    assert not sender.core.has_work()
    sender.core.check_integrity()
    load = sender.core.load()
    assert (load.num_waiting, load.num_reserved, load.num_exporting) == (1, 1, 1)
    sender.core.release(RequestId("export"))
    assert sender.core.has_work()
    drain(sender.core, streams)
    sender.core.release(RequestId("reserved"))
    drain(sender.core, streams)
    assert streams.tokens["local"] == alone(local)
    pool_is_whole(sender.core)


def test_an_engine_whose_requests_all_wait_for_blocks_has_no_work_until_some_are_free() -> None:
    core, _ = watched(num_blocks=11)
    core.reserve(spec_of("reserved", prompt(100)))
    core.add(spec_of("waits", prompt(80)))
    while core.has_work():
        assert not [e for e in core.step() if isinstance(e, TokenEvent)]
    assert core.load().num_waiting == 1
    core.release(RequestId("reserved"), quarantine=True)
    while core.has_work():
        core.step()
    assert core.load().num_waiting == 1
    core.unquarantine(RequestId("reserved"))
    assert len(drain(core).tokens["waits"]) == GREEDY.max_tokens
    pool_is_whole(core)


def test_an_aborted_reservation_is_quarantined() -> None:
    core, _ = watched(num_blocks=30)
    core.reserve(spec_of("r", prompt(100)))
    core.abort(RequestId("r"))
    assert core.step() == [FinishedEvent(RequestId("r"), FinishReason.ABORTED)]
    assert core.load().num_quarantined_blocks == 7
    core.unquarantine(RequestId("r"))
    pool_is_whole(core)


def test_releasing_a_prefill_that_has_not_finished_ends_it() -> None:
    sender, receiver, wire = pair(fake_config(max_num_batched_tokens=16), fake_config())
    for name in ("started", "waiting"):
        spec = spec_of(name, prompt(60))
        lease = receiver.core.reserve(spec)
        assert isinstance(lease, ReservedEvent)
        sender.core.add_prefill(spec, wire.open(lease), 0)
    sender.core.step()
    for name in ("started", "waiting", "started", "unknown"):
        sender.core.release(RequestId(name))
    ends = [e for e in sender.core.step() if isinstance(e, FinishedEvent)]
    assert [e.request_id for e in ends] == ["started", "waiting"]
    pool_is_whole(sender.core)


def test_a_quarantined_export_stays_pinned() -> None:
    sender, receiver, wire = pair(fake_config(), fake_config())
    spec = spec_of("r", prompt(60))
    lease = receiver.core.reserve(spec)
    assert isinstance(lease, ReservedEvent)
    sender.core.add_prefill(spec, wire.open(lease), 0)
    drain(sender.core)
    sender.core.release(spec.request_id, quarantine=True)
    load = sender.core.load()
    assert load.num_blocks - load.num_free_blocks == 4
    sender.core.check_integrity()
    sender.core.unquarantine(spec.request_id)
    pool_is_whole(sender.core)


# --- refusals -----------------------------------------------------------------------------------


def refused_field(core: EngineCore, spec: RequestSpec) -> str:
    fields = set()
    for way_in in (core.add, core.reserve, lambda s: core.add_prefill(s, HandoffId("h"), 0)):
        with pytest.raises(InvalidRequestError) as caught:
            way_in(spec)
        fields.add(caught.value.field)
    assert not core.has_work()
    pool_is_whole(core)
    (field,) = fields
    return field


def test_what_can_never_run_is_refused_at_the_door_by_its_field() -> None:
    core, _ = watched(max_model_len=512)
    outside = np.array([1, 2048], np.uint32)
    emitted = spec_of("r", prompt(5), replace(GREEDY, max_tokens=3), emitted=[9, 9, 9])
    assert refused_field(core, spec_of("r", prompt(0))) == "prompt"
    assert refused_field(core, spec_of("r", prompt(512))) == "prompt"
    assert refused_field(core, spec_of("r", outside)) == "token_ids"
    assert refused_field(core, spec_of("r", prompt(5), SamplingParams(top_p=7.0))) == "top_p"
    assert refused_field(core, emitted) == "max_tokens"


def test_what_kv_memory_can_never_hold_is_refused_and_what_it_just_holds_runs() -> None:
    core, _ = watched(num_blocks=12)  # 11 usable blocks: 176 tokens
    assert refused_field(core, spec_of("r", prompt(177))) == "prompt"
    with pytest.raises(InvalidRequestError, match="KV memory") as caught:
        core.add(spec_of("r", prompt(160), replace(GREEDY, max_tokens=18)))
    assert caught.value.field == "max_tokens"
    fits = spec_of("r", prompt(160), replace(GREEDY, max_tokens=17))
    core.add(fits)
    assert drain(core).tokens["r"] == alone(fits)
    pool_is_whole(core)


def test_an_id_that_runs_already_is_refused() -> None:
    core, _ = watched()
    core.add(spec_of("r", prompt(5)))
    with pytest.raises(InvalidRequestError) as caught:
        core.add(spec_of("r", prompt(5)))
    assert caught.value.field == "request_id"
    streams = Streams()
    drain(core, streams)
    assert len(streams.tokens["r"]) == GREEDY.max_tokens


@pytest.mark.parametrize("cached", [8, 64, 80])
def test_a_receiver_that_claims_part_of_a_block_or_the_whole_prompt_is_refused(cached: int) -> None:
    core, _ = watched()
    with pytest.raises(InvalidRequestError) as caught:
        core.add_prefill(spec_of("r", prompt(64)), HandoffId("h"), cached)
    assert caught.value.field == "num_cached_tokens"
    pool_is_whole(core)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_limits_below_one_are_refused(name: str) -> None:
    changes = {name: -1}
    with pytest.raises(ValueError, match=name):
        FakeEngine(fake_config(**changes))  # type: ignore[arg-type]


def test_specs_for_penalties_hold_every_token_known() -> None:
    core, _ = watched(num_blocks=40)
    runner = core._runner
    run = runner.run
    known: list[list[int]] = []

    def remember(plan: StepPlan, specs: dict[RequestId, RequestSpec]) -> list[SampledToken]:
        (spec,) = specs.values()
        known.append(spec.token_ids.tolist())
        return run(plan, specs)

    runner.run = remember  # type: ignore[method-assign]
    sampling = replace(GREEDY, max_tokens=5, frequency_penalty=1.0)
    core.add(spec_of("r", prompt(6), sampling))
    tokens = drain(core).tokens["r"]
    assert known == [[*prompt(6).tolist(), *tokens[:n]] for n in range(5)]


# --- windows ------------------------------------------------------------------------------------


def windowed(num_blocks: int, chunk: int, window: int = 40) -> FakeEngine:
    """An engine of whose layers none sees everything."""
    config = fake_config(num_blocks, window, max_num_batched_tokens=chunk)
    return FakeEngine(config, sees_all=False)


@pytest.mark.parametrize("chunk", [7, 16, 64, 512])
def test_a_prompt_longer_than_the_pool_is_served_where_every_window_fits(chunk: int) -> None:
    core = windowed(num_blocks=8, chunk=chunk).core  # 7 usable blocks: 112 tokens
    spec = spec_of("r", prompt(500), replace(GREEDY, max_tokens=200))
    core.add(spec)
    assert drain(core).tokens["r"] == alone(spec, 40, sees_all=False)
    pool_is_whole(core)


def test_a_prompt_longer_than_the_pool_is_refused_where_a_layer_sees_everything() -> None:
    core, _ = watched(num_blocks=8, window=40)
    assert refused_field(core, spec_of("r", prompt(113))) == "prompt"


def test_a_prompt_longer_than_the_pool_is_refused_where_its_window_does_not_fit() -> None:
    core = windowed(num_blocks=4, chunk=16).core
    assert refused_field(core, spec_of("r", prompt(49))) == "prompt"
    fits = spec_of("r", prompt(30), replace(GREEDY, max_tokens=19))
    core.add(fits)
    assert drain(core).tokens["r"] == alone(fits, 40, sees_all=False)


def test_long_prompts_take_turns_on_a_pool_of_a_few_windows() -> None:
    core = windowed(num_blocks=16, chunk=32).core
    specs = [spec_of(str(n), prompt(300 + n, n, shared=200)) for n in range(6)]
    for spec in specs:
        core.add(spec)
    streams = drain(core)
    for spec in specs:
        assert streams.tokens[spec.request_id] == alone(spec, 40, sees_all=False)
    pool_is_whole(core)


def test_a_prompt_longer_than_both_pools_is_handed_over_by_its_last_window() -> None:
    config = fake_config(8, 40, max_num_batched_tokens=16)
    sender, receiver, wire = pair(config, config, sees_all=False)
    spec = spec_of("r", prompt(500))
    lease = receiver.core.reserve(spec)
    assert isinstance(lease, ReservedEvent)
    # The receiver lacks nothing that its next token does not look at.
    sender.core.add_prefill(spec, wire.open(lease), lease.num_cached_tokens)
    (first,) = prefilled(event for _ in range(32) for event in sender.core.step())
    assert sorted(wire.pushed[HandoffId("handoff r")]) == sorted(wire.owed(lease))
    sender.core.release(spec.request_id)
    receiver.core.admit(spec.request_id, first.token)
    streams = drain(receiver.core, Streams(tokens={"r": [first.token.token_id]}))
    assert streams.tokens["r"] == alone(spec, 40, sees_all=False)
    pool_is_whole(sender.core)
    pool_is_whole(receiver.core)


@pytest.mark.parametrize("window", [None, 24, 40])
@pytest.mark.parametrize("length", [33, 40, 41, 47, 48, 49])
def test_a_receiver_finds_every_whole_block_of_a_prompt_that_was_handed_to_it(
    length: int, window: int | None
) -> None:
    config = fake_config(window=window)
    sender, receiver, wire = pair(config, config)
    spec = spec_of("r", prompt(length), replace(GREEDY, max_tokens=2))
    lease = receiver.core.reserve(spec)
    assert isinstance(lease, ReservedEvent)
    sender.core.add_prefill(spec, wire.open(lease), 0)
    (first,) = prefilled(sender.core.step())
    receiver.core.admit(spec.request_id, first.token)
    drain(receiver.core, Streams(tokens={"r": [first.token.token_id]}))
    again = receiver.core.reserve(spec)
    assert isinstance(again, ReservedEvent)
    assert again.num_cached_tokens == (length - 1) // 16 * 16


def test_reservations_leave_the_place_and_the_blocks_that_the_first_waiting_request_needs() -> None:
    core, _ = watched(64, max_num_batched_tokens=512, max_num_seqs=8)
    streams, reserved, step, num_done = Streams(), 0, 0, 0
    ready: list[tuple[int, RequestSpec]] = []  # reserved, and in which step they are admitted

    def reserve_what_goes() -> None:
        nonlocal reserved
        spec = spec_of(
            f"small-{reserved}", prompt(64, 100 + reserved), replace(GREEDY, max_tokens=40)
        )
        if isinstance(core.reserve(spec), ReservedEvent):
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


def test_a_prompt_that_quarantine_leaves_no_room_for_holds_up_nobody() -> None:
    core, _ = watched(num_blocks=64)
    core.reserve(spec_of("lost", prompt(320)))
    core.abort(RequestId("lost"))  # 20 blocks until its writer has stopped
    core.add(spec_of("large", prompt(800, 1)))
    core.add(spec_of("small", prompt(10, 2)))
    streams = drain(core)
    assert set(streams.finished) == {"small"}
    assert isinstance(core.reserve(spec_of("handed over", prompt(10, 3))), ReservedEvent)
    core.release(RequestId("handed over"))
    core.unquarantine(RequestId("lost"))
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


def test_an_engine_is_blocked_from_when_nobody_could_start_until_somebody_does() -> None:
    now = 5.0
    engine = FakeEngine(fake_config(num_blocks=21))
    core = EngineCore(engine.config, engine.core._runner, engine.sink, clock=lambda: now)
    core.reserve(spec_of("held", prompt(160)))
    core.step()
    assert core.blocked_since is None  # nobody waits
    core.add(spec_of("waits", prompt(260, 1)))
    core.step()
    now = 6.0
    core.add(spec_of("later", prompt(260, 2)))
    core.step()
    assert core.blocked_since == 5.0
    for name in ("waits", "later"):
        core.abort(RequestId(name))
    assert core.blocked_since is None
    now = 7.0
    core.add(spec_of("next", prompt(260, 3)))
    assert core.blocked_since is None
    core.step()
    assert core.blocked_since == 7.0
    core.release(RequestId("held"))
    core.step()
    assert core.blocked_since is None
    core.abort(RequestId("next"))
    pool_is_whole(core)


def test_a_prompt_that_a_late_readers_blocks_leave_no_room_for_holds_up_nobody() -> None:
    sender, _, wire = pair(fake_config(num_blocks=21), fake_config())
    core, export = sender.core, spec_of("export", prompt(160))
    core.add_prefill(export, wire.open(ReservedEvent(export.request_id, 0, ())), 0)
    wire.leases.clear()
    drain(core)
    core.release(export.request_id, quarantine=True)  # 10 blocks, still read
    core.add(spec_of("large", prompt(200, 1)))
    core.add(spec_of("small", prompt(10, 2)))
    streams = drain(core)
    assert set(streams.finished) == {"small"}
    assert isinstance(core.reserve(spec_of("handed over", prompt(10, 3))), ReservedEvent)
    core.release(RequestId("handed over"))
    shares = spec_of("shares", np.concatenate([prompt(160), prompt(100, 4)]))
    core.add(shares)  # more than is left, but most of it is there
    drain(core, streams)
    assert set(streams.finished) == {"small", "shares"}
    core.unquarantine(export.request_id)
    drain(core, streams)
    assert set(streams.finished) == {"small", "shares", "large"}
    pool_is_whole(core)


def test_a_prompt_that_shares_what_a_late_reader_holds_is_not_passed_by() -> None:
    sender, _, wire = pair(fake_config(num_blocks=21), fake_config())
    core, export = sender.core, spec_of("export", prompt(160))
    core.add_prefill(export, wire.open(ReservedEvent(export.request_id, 0, ())), 0)
    wire.leases.clear()
    drain(core)
    core.release(export.request_id, quarantine=True)  # 10 blocks, still read
    core.reserve(spec_of("held", prompt(128, 1)))
    core.add(spec_of("shares", np.concatenate([prompt(160), prompt(100, 4)])))  # lacks 7 of 17
    core.add(spec_of("small", prompt(10, 2)))
    streams = drain(core)
    assert not streams.finished
    assert isinstance(core.reserve(spec_of("newcomer", prompt(10, 3))), NoCapacityEvent)
    core.release(RequestId("held"))
    drain(core, streams)
    assert set(streams.finished) == {"small", "shares"}
    core.unquarantine(export.request_id)
    pool_is_whole(core)


def test_a_reservation_goes_before_a_waiting_request_of_lower_priority_only() -> None:
    core, _ = watched(num_blocks=21)
    core.reserve(spec_of("held", prompt(160)))
    core.add(spec_of("waits", prompt(200, 1)))
    assert isinstance(core.reserve(spec_of("equal", prompt(10))), NoCapacityEvent)
    assert isinstance(core.reserve(spec_of("urgent", prompt(10), priority=1)), ReservedEvent)
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
        answer = core.reserve(spec_of("comes", prompt(190, 2, shared=160), once))
        assert isinstance(answer, ReservedEvent if granted else NoCapacityEvent), answer
        assert isinstance(core.reserve(spec_of("other", prompt(190, 3), once)), NoCapacityEvent)
        streams.take(core.step())
        assert "waits" in [seq.request_id for seq in seen.plans[-1].seqs]
        drain(core, streams)
        assert len(streams.finished) == 2 + num_running
        core.release(RequestId("comes"))
        pool_is_whole(core)
