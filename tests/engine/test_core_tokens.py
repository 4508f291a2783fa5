"""Whatever an engine does with memory, chunks and batches, a request's tokens stay its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from baton.finish_reason import FinishReason
from cluster.worker.service import CachedBlocks
from engine.request import (
    BlocksRemovedEvent,
    BlocksStoredEvent,
    FinishedEvent,
    RequestId,
    RequestSpec,
    SampledToken,
    SamplingParams,
    StepPlan,
    TokenEvent,
)
from engine.run.core import EngineCore
from kv_transfer.block_hash import CacheScope
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
    run,
    spec_of,
)

LENGTHS = (1, 2, 15, 16, 17, 32, 100, 333)
WINDOWS = pytest.mark.parametrize("window", [None, 24, 40])


@WINDOWS
@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_batches_and_chunks_of_any_size_give_the_tokens_of_a_request_alone(
    window: int | None, chunk: int
) -> None:
    specs = [spec_of(str(n), prompt(n)) for n in LENGTHS]
    streams = run(fake_config(window=window, max_num_batched_tokens=chunk), specs)
    for spec in specs:
        assert streams.tokens[spec.request_id] == alone(spec, window)


@WINDOWS
def test_a_prefix_hit_gives_the_tokens_of_a_miss(window: int | None) -> None:
    engine = FakeEngine(fake_config(window=window)).core
    for turn, length in enumerate((200, 200, 230, 170, 96)):
        spec = spec_of(str(turn), prompt(length, turn, shared=190))
        engine.add(spec)
        assert drain(engine).tokens[str(turn)] == alone(spec, window)
    pool_is_whole(engine)


def test_the_cached_part_of_a_prompt_is_not_computed_again() -> None:
    engine, _decode, wire = pair(fake_config(), fake_config())
    first = spec_of("first", prompt(100))
    for spec in (first, replace(first, request_id=RequestId("second"))):
        wire.begin(spec)
        (event,) = prefilled(engine.core.step())
        assert event.num_cached_tokens == (0 if spec is first else 96)


@WINDOWS
def test_preempted_requests_are_recomputed_with_the_same_tokens(window: int | None) -> None:
    sampling = replace(GREEDY, max_tokens=120)
    specs = [spec_of(str(seed), prompt(60, seed), sampling) for seed in range(6)]
    engine = FakeEngine(fake_config(num_blocks=28, window=window)).core
    for spec in specs:
        engine.add(spec)
    streams = Streams()
    while engine.has_work():
        streams.take(engine.step())
        engine.check_integrity()
    assert engine.load().num_preemptions, "the pool was large enough: the test shows nothing"
    for spec in specs:
        assert streams.tokens[spec.request_id] == alone(spec, window)
    pool_is_whole(engine)


def test_a_seed_gives_the_same_tokens_in_any_company_and_another_seed_others() -> None:
    sampled = replace(GREEDY, temperature=1.0, seed=7)
    spec = spec_of("mine", prompt(50), sampled)
    crowd = [spec_of(str(s), prompt(50), replace(sampled, seed=s)) for s in range(5)]
    streams = run(fake_config(max_num_batched_tokens=33), [*crowd, spec])
    assert streams.tokens["mine"] == alone(spec)
    assert len({tuple(streams.tokens[other.request_id]) for other in crowd}) == len(crowd)


@pytest.mark.parametrize("num_emitted", [1, 7, 23])
def test_a_request_that_resumes_elsewhere_goes_on_at_its_index_with_the_same_tokens(
    num_emitted: int,
) -> None:
    sampling = replace(GREEDY, temperature=0.8, seed=3)
    whole = alone(spec_of("whole", prompt(40), sampling))
    resumed = spec_of("resumed", prompt(40), sampling, emitted=whole[:num_emitted])
    engine = FakeEngine(fake_config()).core
    engine.add(resumed)
    streams = Streams(tokens={"resumed": whole[:num_emitted]})
    assert drain(engine, streams).tokens["resumed"] == whole
    pool_is_whole(engine)


# --- ends ---------------------------------------------------------------------------------------


def test_an_end_of_sequence_or_stop_token_ends_a_request_and_min_tokens_forbids_it() -> None:
    tokens = alone(spec_of("free", prompt(30)))
    stop = tokens[5]
    assert stop not in tokens[:5]
    sampling = replace(GREEDY, stop_token_ids=frozenset({stop}))
    streams = run(fake_config(), [spec_of("stops", prompt(30), sampling)])
    assert streams.tokens["stops"] == tokens[:6]
    assert streams.finished["stops"] is FinishReason.STOP
    late = replace(sampling, min_tokens=10)
    streams = run(fake_config(), [spec_of("late", prompt(30), late)])
    assert streams.tokens["late"][:5] == tokens[:5]
    assert stop not in streams.tokens["late"][:10]
    assert len(streams.tokens["late"]) >= 10


def test_max_tokens_and_the_context_end_a_request_with_length() -> None:
    config = fake_config(max_model_len=64)
    streams = run(
        config,
        [
            spec_of("asked", prompt(10), replace(GREEDY, max_tokens=7)),
            spec_of("context", prompt(50), replace(GREEDY, max_tokens=500)),
        ],
    )
    assert len(streams.tokens["asked"]) == 7
    assert len(streams.tokens["context"]) == 14
    assert set(streams.finished.values()) == {FinishReason.LENGTH}


def test_an_aborted_request_frees_its_blocks_whatever_it_was_doing() -> None:
    engine = FakeEngine(fake_config(max_num_batched_tokens=32, max_num_seqs=2)).core
    for name in ("decodes", "prefills", "waits"):
        engine.add(spec_of(name, prompt(16 if name == "decodes" else 100, len(name))))
    engine.step()
    engine.step()
    assert (engine.load().num_running, engine.load().num_waiting) == (2, 1)
    for name in ("waits", "prefills", "decodes", "decodes", "unknown"):
        engine.abort(RequestId(name))
    events = engine.step()
    ends = [e for e in events if isinstance(e, FinishedEvent)]
    assert [e.request_id for e in ends] == ["waits", "prefills", "decodes"]
    assert all(e.reason is FinishReason.ABORTED for e in ends)
    assert not engine.has_work()
    pool_is_whole(engine)


# --- events -------------------------------------------------------------------------------------


def test_events_followed_from_the_start_name_exactly_what_the_snapshot_names() -> None:
    engine = FakeEngine(fake_config(num_blocks=40)).core
    known: dict[bytes, bytes | None] = {}
    blocks = CachedBlocks()
    for seed in range(12):
        engine.add(spec_of(str(seed), prompt(60 + 20 * seed, seed, shared=16 * (seed % 4))))
        while engine.has_work():
            events = engine.step()
            blocks.apply(events)
            for event in events:
                if isinstance(event, BlocksStoredEvent):
                    parents = [event.parent, *event.hashes]
                    assert event.parent is None or event.parent in known
                    assert not set(event.hashes) & set(known)
                    known.update(zip(event.hashes, parents))
                elif isinstance(event, BlocksRemovedEvent):
                    for block_hash in event.hashes:
                        del known[block_hash]
                        assert block_hash not in known.values(), "a parent went before its child"
    snapshot: dict[bytes, bytes | None] = {}
    for parent, hashes in blocks.chains():
        assert parent is None or parent in snapshot
        snapshot.update(zip(hashes, [parent, *hashes]))
    assert snapshot == known
    assert known.keys() == engine._kv.pools[0]._by_hash.keys()
    assert len(known) > 10


def test_requests_that_compute_one_prefix_at_once_end_up_sharing_it() -> None:
    engine = FakeEngine(fake_config()).core
    specs = [spec_of(str(seed), prompt(100, seed, shared=80)) for seed in range(4)]
    for spec in specs:
        engine.add(spec)
    streams = Streams()
    streams.take(engine.step())
    load = engine.load()
    assert load.num_blocks - load.num_free_blocks == 5 + 4 * 2
    drain(engine, streams)
    pool_is_whole(engine)
    assert len(engine._kv.pools[0]._by_hash) == 5 + 4 * 2
    engine.add(replace(specs[2], request_id=RequestId("again")))
    streams = drain(engine, streams)
    assert streams.tokens["again"] == alone(specs[2])


def test_a_salt_keeps_equal_prompts_apart() -> None:
    engine = FakeEngine(fake_config()).core
    for salt in ("", "a", "b"):
        engine.add(spec_of(salt or "none", prompt(64), scope=CacheScope(cache_salt=salt)))
    drain(engine)
    assert len(engine._kv.pools[0]._by_hash) == 3 * 5


def test_tenants_share_cached_blocks_only_where_the_operator_made_them_public() -> None:
    engine = FakeEngine(fake_config()).core
    cached: dict[str, int] = {}

    def ask(name: str, tokens: np.ndarray, scope: CacheScope) -> None:
        engine.add(spec_of(name, tokens, scope=scope))
        while engine.has_work():
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    cached[event.request_id] = event.num_cached_tokens

    for tenant in ("a", "b"):
        ask(f"{tenant} private", prompt(80), CacheScope(tenant))
        ask(f"{tenant} half public", prompt(80, 1), CacheScope(tenant, "", 40))
    ask("a again", prompt(80), CacheScope("a"))
    assert cached == {
        "a private": 0,
        "b private": 0,
        "a half public": 0,
        "b half public": 32,
        "a again": 64,
    }


def test_learned_rates_follow_the_clock() -> None:
    times = iter(np.arange(0, 1000, 0.25))
    engine = FakeEngine(fake_config())
    core = EngineCore(engine.config, engine.core._runner, engine.sink, clock=lambda: next(times))
    core.add(spec_of("r", prompt(200)))
    while core.has_work():
        core.step()
    load = core.load()
    assert load.decode_step_s == pytest.approx(0.25)
    assert 800 <= load.prefill_tokens_per_s <= 1600  # how much of it a step costs is not known yet


def test_a_step_is_predicted_by_its_own_work_and_not_at_all_before_such_work_was_measured() -> None:
    predicted: list[float | None] = []

    def clock() -> float:
        predicted.append(core.health.predicted_step_s)
        return 0.25 * len(predicted)

    engine = FakeEngine(fake_config(max_num_batched_tokens=64))
    core = EngineCore(engine.config, engine.core._runner, engine.sink, clock=clock)

    def of_next_step() -> float | None:
        core.step()
        return predicted[-1]

    assert core._rates.predict(StepPlan(step=1, seqs=())) == 0  # messages alone
    core.add(spec_of("a", prompt(64 + 16)))
    assert of_next_step() is None  # 64 tokens, in 0.25 s
    assert 0.25 * 16 / 64 <= (of_next_step() or 0.0) <= 0.25
    assert of_next_step() is None  # the first decode
    assert of_next_step() == pytest.approx(0.25)
    core.add(spec_of("b", prompt(33, seed=1)))
    assert 0.25 < (of_next_step() or 0.0) <= 0.5


def test_tokens_are_announced_once_per_step_for_all_requests() -> None:
    engine = FakeEngine(fake_config()).core
    for seed in range(3):
        engine.add(spec_of(str(seed), prompt(10, seed)))
    events = [e for e in engine.step() if isinstance(e, TokenEvent)]
    assert [(e.request_id, e.index) for e in events] == [("0", 0), ("1", 0), ("2", 0)]


def test_logprobs_come_with_the_tokens_that_asked() -> None:
    engine = FakeEngine(fake_config()).core
    engine.add(spec_of("r", prompt(10), SamplingParams(max_tokens=2, logprobs=3)))
    (event,) = [e for e in engine.step() if isinstance(e, TokenEvent)]
    assert event.token.logprobs is not None
    assert len(event.token.logprobs.top) == 3


def test_sampling_sees_every_token_and_its_index_after_preemption_and_in_a_later_attempt() -> None:
    engine = FakeEngine(fake_config(num_blocks=12)).core
    sampling = SamplingParams(max_tokens=90, ignore_eos=True, seed=3, frequency_penalty=0.5)
    whole = alone(spec_of("r", prompt(40, 1), sampling))
    runner = engine._runner
    run_plan = runner.run
    seen: dict[str, list[int]] = {}

    def remember(
        plan: StepPlan, specs: dict[RequestId, RequestSpec], *rest: Any
    ) -> list[SampledToken]:
        for request_id, spec in specs.items():
            known = spec.token_ids[40:].tolist()
            assert spec.num_prompt_tokens == 40
            assert known == whole[: len(known)]
            seen.setdefault(request_id, []).append(len(known))
        recomputed.update(s.request_id for s in plan.seqs if len(s.token_ids) > 1 and s.start)
        return run_plan(plan, specs, *rest)

    recomputed: set[str] = set()  # from a cached prefix
    runner.run = remember  # type: ignore[method-assign]
    engine.add(spec_of("first", prompt(40, 1), sampling))
    engine.add(
        spec_of(
            "resumed", prompt(40, 1), sampling, whole[:30], scope=CacheScope(cache_salt="other")
        )
    )
    while engine.has_work():
        engine.step()
    assert recomputed, "nothing was preempted"
    assert seen == {"first": [*range(90)], "resumed": [*range(30, 90)]}
    pool_is_whole(engine)
