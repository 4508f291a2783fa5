"""Who runs when: budget, order, limits, preemption, and what is released."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.request import FinishedEvent, NoCapacityEvent, RequestId, ReservedEvent, TokenEvent
from tests.engine.fakes import (
    GREEDY,
    Streams,
    alone,
    drain,
    fake_config,
    pair,
    pool_is_whole,
    prompt,
    reserve,
    spec_of,
)
from tests.engine.watching import watched


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
    assert isinstance(reserve(core, spec_of("reserved", prompt(10))), ReservedEvent)
    for n in range(5):
        core.add(spec_of(str(n), prompt(10, n)))
    streams = drain(core)
    assert max(len(plan.seqs) for plan in seen.plans) == 2
    assert len(streams.finished) == 5
    core.release(RequestId("reserved"))
    for n in range(3):
        assert isinstance(reserve(core, spec_of(f"r{n}", prompt(10))), ReservedEvent)
    assert isinstance(reserve(core, spec_of("r3", prompt(10))), NoCapacityEvent)


def test_lower_priority_then_earlier_arrival_goes_first() -> None:
    core, seen = watched(max_num_seqs=1)
    for name, priority in (("last", 5), ("first", 0), ("second", 0), ("urgent", -1)):
        spec = spec_of(name, prompt(5), replace(GREEDY, max_tokens=1), priority=priority)
        core.add(spec)
    drain(core)
    order = [plan.seqs[0].request_id for plan in seen.plans]
    assert order == ["urgent", "first", "second", "last"]


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
    assert core.load().num_preemptions == 1
    assert core.load().num_recomputed_tokens == recomputed - (60 + 99)
    assert len(streams.tokens["new"]) == 100
    pool_is_whole(core)


def test_reserved_and_exported_requests_are_never_preempted() -> None:
    config = fake_config(num_blocks=21)
    sender, _, wire = pair(config, fake_config())
    wire.begin(spec_of("export", prompt(60)))
    sender.core.step()
    reserved = reserve(sender.core, spec_of("reserved", prompt(60, 1)))
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
    reserve(core, spec_of("reserved", prompt(100)))
    core.add(spec_of("waits", prompt(80)))
    while core.has_work():
        assert not [e for e in core.step() if isinstance(e, TokenEvent)]
    assert core.load().num_waiting == 1
    core.abort(RequestId("reserved"))
    while core.has_work():
        core.step()
    assert core.load().num_waiting == 1
    core.release(RequestId("reserved"))
    assert len(drain(core).tokens["waits"]) == GREEDY.max_tokens
    pool_is_whole(core)


def test_releasing_a_prefill_that_has_not_finished_ends_it() -> None:
    sender, _, wire = pair(fake_config(max_num_batched_tokens=16), fake_config())
    for name in ("started", "waiting"):
        spec = spec_of(name, prompt(60))
        wire.begin(spec)
    sender.core.step()
    for name in ("started", "waiting", "started", "unknown"):
        sender.core.release(RequestId(name))
    ends = [e for e in sender.core.step() if isinstance(e, FinishedEvent)]
    assert [e.request_id for e in ends] == ["started", "waiting"]
    pool_is_whole(sender.core)


def test_a_load_counts_quarantined_reservations_and_exports_alike() -> None:
    sender, _, wire = pair(fake_config(), fake_config())
    for name in ("first", "same"):  # the second shares three cached blocks of the first
        spec = spec_of(name, prompt(60))
        wire.begin(spec)
        drain(sender.core)
        sender.core.abort(spec.request_id)
    reserve(sender.core, spec_of("lost", prompt(40, 1)))
    sender.core.abort(RequestId("lost"))
    load = sender.core.load()
    assert load.num_quarantined_blocks == load.num_blocks - load.num_free_blocks == 5 + 3
    sizes = [
        sender.model.layout.rank_block_bytes(g, 0, 1)
        for g in range(len(sender.model.layout.groups))
    ]
    assert load.num_quarantined_bytes == 8 * sum(sizes)
    sender.core.release(RequestId("first"))
    assert sender.core.load().num_quarantined_blocks == 4 + 3
    sender.core.release(RequestId("same"))
    sender.core.release(RequestId("lost"))
    pool_is_whole(sender.core)
