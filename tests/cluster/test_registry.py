"""The registry with a clock the test moves."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.config.workers import DecodeConfig, RegistryConfig, WorkerSettings
from baton.errors import NotFoundError, OtherModelError
from baton.fleet import WorkerState
from cluster.progress import Progress
from cluster.registry.registry import Registration, Registry, Stream
from tests.cluster.pool_settings import settings_of
from tests.cluster.registered import pass_s


def registration(worker_id: str = "decode-0", incarnation: int = 7) -> Registration:
    return Registration(worker_id, incarnation, "decode", b"info")


def make() -> tuple[Registry, ManualClock]:
    clock = ManualClock()
    registry = Registry(RegistryConfig(), clock.now_s)
    registry.pools.add(settings_of(), 1)
    return registry, clock


def register(registry: Registry, incarnation: int = 7) -> Stream:
    stream = registry.register(registration(incarnation=incarnation))
    assert stream is not None
    return stream


def beat(
    registry: Registry,
    stream: Stream,
    idle_s: float = 0.0,
    runnable: bool = True,
    predicted_step_s: float | None = 0.01,
    draining: bool = False,
) -> bool:
    progress = Progress(runnable, idle_s, predicted_step_s)
    return registry.heartbeat(stream, progress, b"load", draining)


def state(registry: Registry) -> WorkerState:
    (entry,) = registry.workers()
    return entry.state


def test_a_worker_is_starting_until_its_first_progress_and_then_live() -> None:
    registry, _ = make()
    stream = register(registry)
    assert state(registry) is WorkerState.STARTING
    assert registry.pools.status()[0].live_replicas == 0
    beat(registry, stream)
    assert state(registry) is WorkerState.LIVE
    assert registry.pools.status()[0].live_replicas == 1


def test_a_silent_worker_is_suspect_until_it_is_heard_then_gone_then_forgotten() -> None:
    registry, clock = make()
    stream = register(registry)
    beat(registry, stream)
    pass_s(clock, registry, 2.9)
    assert state(registry) is WorkerState.LIVE
    pass_s(clock, registry, 0.2)
    assert state(registry) is WorkerState.SUSPECT
    beat(registry, stream)
    assert state(registry) is WorkerState.LIVE
    pass_s(clock, registry, 16.0)
    assert state(registry) is WorkerState.GONE
    assert not beat(registry, stream)
    pass_s(clock, registry, 10.0)
    assert registry.workers() == ()


def test_a_pause_of_the_registry_is_not_taken_for_its_workers_silence() -> None:
    registry, clock = make()
    stream, dead = register(registry), registry.register(registration("decode-1"))
    assert dead is not None
    beat(registry, stream)
    beat(registry, dead)
    clock.advance(16.0)  # stopped; what the workers said meanwhile is still to be read
    assert [w.state for w in registry.workers()] == [WorkerState.LIVE] * 2
    pass_s(clock, registry, 1.0)
    assert beat(registry, stream)
    pass_s(clock, registry, 2.0)
    states = [w.state for w in registry.workers()]
    assert states == [WorkerState.LIVE, WorkerState.SUSPECT]
    clock.advance(60.0)
    (suspect_s,) = (w.suspect_s for w in registry.workers() if w.suspect_s)
    assert suspect_s < 3.0  # a fence waits for the registry's own time too


def test_a_registry_that_is_late_at_every_look_still_finds_a_worker_silent() -> None:
    registry, clock = make()
    beat(registry, register(registry))
    for _ in range(20):
        clock.advance(5.0)
        registry.refresh()
    assert state(registry) is WorkerState.GONE


@pytest.mark.parametrize(
    ("predicted_step_s", "well_s", "stuck_s"),
    [(0.01, 2.9, 3.1), (1.0, 10.0, 21.0), (None, 100.0, 121.0)],
    ids=["short", "long", "never done before"],
)
def test_runnable_work_without_a_step_is_stuck_after_its_predicted_time_although_heartbeats_come(
    predicted_step_s: float | None, well_s: float, stuck_s: float
) -> None:
    registry, _ = make()
    stream = register(registry)
    beat(registry, stream)
    beat(registry, stream, idle_s=well_s, predicted_step_s=predicted_step_s)
    assert state(registry) is WorkerState.LIVE
    beat(registry, stream, idle_s=stuck_s, predicted_step_s=predicted_step_s)
    assert state(registry) is WorkerState.SUSPECT
    beat(registry, stream, idle_s=stuck_s, runnable=False, predicted_step_s=predicted_step_s)
    assert state(registry) is WorkerState.LIVE
    beat(registry, stream, idle_s=stuck_s, predicted_step_s=predicted_step_s, draining=True)
    assert state(registry) is WorkerState.SUSPECT


def test_only_the_newest_stream_of_a_worker_is_heard() -> None:
    registry, _ = make()
    former = register(registry)
    beat(registry, former)
    newer = register(registry)
    assert (registry.hears(former), registry.hears(newer)) == (False, True)
    assert not beat(registry, former, idle_s=60.0)  # on its way since before: history
    assert state(registry) is WorkerState.LIVE
    registry.ask_drain("decode-0")
    assert (registry.drain_asked(former), registry.drain_asked(newer)) == (False, True)


def test_registering_again_in_time_is_no_change_of_state() -> None:
    registry, clock = make()
    beat(registry, register(registry))
    pass_s(clock, registry, 2.9)
    version = registry.version
    register(registry)
    pass_s(clock, registry, 2.9)
    assert registry.version == version
    assert state(registry) is WorkerState.LIVE


def test_a_newer_incarnation_replaces_the_older_and_the_older_is_refused() -> None:
    registry, _ = make()
    older = register(registry, incarnation=7)
    beat(registry, older)
    newer = register(registry, incarnation=8)
    assert state(registry) is WorkerState.STARTING
    assert not beat(registry, older)
    assert registry.register(registration(incarnation=7)) is None
    assert registry.hears(newer)
    assert registry.workers()[0].registration.incarnation == 8


def test_a_worker_that_was_gone_may_register_again_even_with_a_smaller_incarnation() -> None:
    """The clock was set back between the two starts."""
    registry, _ = make()
    register(registry, incarnation=8)
    registry.gone("decode-0", 8)
    beat(registry, register(registry, incarnation=7))
    assert state(registry) is WorkerState.LIVE


def test_a_draining_worker_is_given_the_silence_of_any_other_and_is_draining_when_back() -> None:
    registry, clock = make()
    stream = register(registry)
    beat(registry, stream)
    registry.ask_drain("decode-0")
    assert registry.drain_asked(stream)
    beat(registry, stream, draining=True)
    assert state(registry) is WorkerState.DRAINING
    pass_s(clock, registry, 2.9)
    assert state(registry) is WorkerState.DRAINING
    pass_s(clock, registry, 2.0)
    assert state(registry) is WorkerState.SUSPECT
    stream = register(registry)
    assert state(registry) is WorkerState.DRAINING
    assert registry.drain_asked(stream)
    beat(registry, stream)
    assert state(registry) is WorkerState.DRAINING
    pass_s(clock, registry, 15.1)
    assert state(registry) is WorkerState.GONE
    with pytest.raises(NotFoundError):
        registry.ask_drain("decode-0")


def test_a_worker_whose_process_is_over_is_gone_at_once() -> None:
    registry, _ = make()
    stream = register(registry)
    beat(registry, stream, draining=True)
    registry.gone("decode-0", 6)  # an earlier start of it
    assert state(registry) is WorkerState.DRAINING
    registry.gone("decode-0", 7)
    assert state(registry) is WorkerState.GONE
    assert not registry.hears(stream)


def test_a_snapshot_changes_nothing_however_late_it_is_taken() -> None:
    registry, clock = make()
    registry.pools.set_replicas("decode", 0)
    beat(registry, register(registry))
    registry.routers.report("router", b"report", registry.routers.opened())
    registry.refresh()

    def written() -> bytes:
        return pickle.dumps(registry)

    for late_s in (0.0, 2.0, 5.0, 1000.0):
        clock.advance(late_s)
        before = written()
        first = registry.workers()
        assert registry.workers() == first
        assert state(registry) is WorkerState.LIVE
        assert written() == before
    pass_s(clock, registry, 20.0)
    assert state(registry) is WorkerState.GONE


def of_model(model_fingerprint: bytes, worker_id: str = "decode-1") -> Registration:
    return Registration(worker_id, 7, "decode", b"info", "llama", model_fingerprint)


def test_the_first_worker_s_model_binds_the_registry_while_any_worker_is_left() -> None:
    registry, _ = make()
    register(registry)  # it tells of no model
    assert registry.model_fingerprint == b""
    assert registry.register(of_model(b"one")) is not None
    assert registry.model_fingerprint == b"one"
    registry.gone("decode-1", 7)
    with pytest.raises(OtherModelError) as caught:
        registry.register(of_model(b"two", "decode-2"))
    assert caught.value.message == (
        f"worker decode-2 loaded {Path('models/demo').resolve()}: its weights or configuration "
        f"differ from the model that serves here: fingerprint {b'two'.hex()}, not {b'one'.hex()}. "
        "Pin `model_revision`, set one engine.quantization for all pools, or start a new cluster "
        "for another model"
    )
    assert registry.register(of_model(b"one", "decode-2")) is not None
    assert registry.register(of_model(b"", "decode-3")) is not None
    assert registry.model_fingerprint == b"one"


def test_a_fleet_that_has_gone_binds_no_model() -> None:
    registry, _ = make()
    assert registry.register(of_model(b"one")) is not None
    registry.gone("decode-1", 7)
    assert registry.model_fingerprint == b""
    assert registry.register(of_model(b"two", "decode-2")) is not None
    assert registry.model_fingerprint == b"two"


def test_a_refused_worker_is_named_with_what_clients_call_its_model_where_its_pool_is_unknown() -> (
    None
):
    registry = Registry(RegistryConfig(), ManualClock().now_s, model_fingerprint=b"one")
    with pytest.raises(OtherModelError, match="worker decode-1 loaded llama: "):
        registry.register(of_model(b"two"))
    assert registry.workers() == ()


@given(st.lists(st.sampled_from(["register", "beat", "stuck", "drain", "gone", "wait"])))
def test_the_version_rises_exactly_when_a_state_or_the_membership_changes(steps: list[str]) -> None:
    registry, clock = make()
    streams = [Stream("decode-0", 0)]

    def seen() -> list[tuple[str, WorkerState]]:
        return [(w.registration.worker_id, w.state) for w in registry.workers()]

    actions = {
        "register": lambda: streams.append(register(registry)),
        "beat": lambda: beat(registry, streams[-1]),
        "stuck": lambda: beat(registry, streams[-1], idle_s=9.0),
        "drain": lambda: seen() and seen()[0][1] is not WorkerState.GONE and drain(registry),
        "gone": lambda: registry.gone("decode-0", 7),
    }
    for step in steps:
        before, version = seen(), registry.version
        if step == "wait":
            pass_s(clock, registry, 4.0)
        else:
            actions[step]()
        assert registry.version >= version
        if seen() != before:
            assert registry.version > version


def drain(registry: Registry) -> None:
    registry.ask_drain("decode-0")


def test_failed_starts_are_counted_in_a_row_and_forgiven_once_the_worker_is_live() -> None:
    registry, _ = make()
    assert registry.pools.record_failure("decode", "decode-0", "no such model", served=False) == 1
    assert registry.pools.record_failure("decode", "decode-1", "killed", served=True) == 0
    assert registry.pools.record_failure("decode", "decode-0", "still none", served=False) == 2
    (pool,) = registry.pools.status()
    assert (pool.last_error, pool.num_failed_starts) == ("still none", 2)
    beat(registry, register(registry))
    (pool,) = registry.pools.status()
    assert (pool.last_error, pool.num_failed_starts) == ("killed", 0)
    assert registry.pools.record_failure("decode", "decode-1", "once more", served=False) == 1
    registry.pools.clear_failure("decode-1")
    assert registry.pools.status()[0].last_error == ""


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (RegistryConfig, "silent_after_s", 0.0),
        (RegistryConfig, "gone_after_s", 3.0),  # no longer than silent_after_s
        (RegistryConfig, "stuck_factor", 0.5),
        (RegistryConfig, "forget_after_s", -1.0),
        (RegistryConfig, "first_step_s", float("inf")),
        (RegistryConfig, "register_within_s", 0.0),
        (DecodeConfig, "max_lease_s", 0.0),
        (WorkerSettings, "heartbeat_s", 0.0),
        (WorkerSettings, "drain_timeout_s", -1.0),
        (WorkerSettings, "leave_timeout_s", 0.0),
        (WorkerSettings, "metrics_port", 65536),
    ],
)
def test_a_setting_out_of_range_is_refused_by_its_name(
    kind: type, field: str, value: float
) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must .*, not {value}$"):
        kind(**{field: value})
