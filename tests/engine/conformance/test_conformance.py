"""Every engine keeps the contract; one that breaks it in one place is found out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.request import (
    EngineEvent,
    FinishedEvent,
    NoCapacityEvent,
    RequestId,
    ReservedEvent,
    SampledToken,
)
from tests.engine.conformance import checks
from tests.engine.conformance.tenants import TENANTS, Tenant


@pytest.mark.parametrize("tenant", TENANTS, ids=lambda tenant: tenant.name)
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_an_engine_keeps_the_contract(check: Callable[[Tenant], None], tenant: Tenant) -> None:
    check(tenant)


# --- mutations ------------------------------------------------------------------------------------


def frees_what_a_late_writer_may_reach(engine: Any) -> None:
    abort = engine.abort

    def mutant(request_id: RequestId) -> None:
        engine.abort = abort  # which `release` may call
        abort(request_id)
        engine.release(request_id)
        engine.abort = mutant

    engine.abort = mutant


def forgets_a_block_of_each_push(engine: Any) -> None:
    sink = engine._runner._sink
    layer_done = sink.layer_done
    sink.layer_done = lambda layer, pushes: layer_done(
        layer, [replace(p, ordinals=p.ordinals[1:], block_ids=p.block_ids[1:]) for p in pushes]
    )


def opens_no_handoff(engine: Any) -> None:
    add_prefill = engine.add_prefill
    engine.add_prefill = lambda spec, handoff, cached, opening: add_prefill(spec, handoff, cached)


def goes_on_from_another_first_token(engine: Any) -> None:
    admit = engine.admit
    engine.admit = lambda request_id, first: admit(
        request_id, SampledToken((first.token_id + 7) % 300)
    )


def changes_events(engine: Any, change: Callable[[EngineEvent], list[EngineEvent]]) -> None:
    step = engine.step
    engine.step = lambda: [new for event in step() for new in change(event)]


def answers_twice(engine: Any) -> None:
    kinds = ReservedEvent | NoCapacityEvent
    changes_events(engine, lambda e: [e, e] if isinstance(e, kinds) else [e])


def tells_no_end(engine: Any) -> None:
    changes_events(engine, lambda e: [] if isinstance(e, FinishedEvent) else [e])


def ends_twice(engine: Any) -> None:
    changes_events(engine, lambda e: [e, e] if isinstance(e, FinishedEvent) else [e])


def never_frees(engine: Any) -> None:
    engine.release = lambda request_id: engine.abort(request_id)


def takes_anything(engine: Any) -> None:
    add = engine.add
    engine.add = lambda spec: add(replace(spec, sampling=replace(spec.sampling, top_p=1.0)))


def swallows_the_devices_failure(engine: Any) -> None:
    step = engine.step

    def mutant() -> list[EngineEvent]:
        try:
            return step()  # type: ignore[no-any-return]
        except OSError:
            return []

    engine.step = mutant


MUTATIONS: dict[Callable[[Any], None], Callable[[Tenant], None]] = {
    frees_what_a_late_writer_may_reach: (
        checks.an_aborted_reservation_keeps_its_blocks_until_its_writer_has_stopped
    ),
    forgets_a_block_of_each_push: (
        checks.a_handoff_carries_what_the_receiver_lacks_and_its_tokens_are_the_same
    ),
    opens_no_handoff: checks.a_handoff_carries_what_the_receiver_lacks_and_its_tokens_are_the_same,
    goes_on_from_another_first_token: checks.the_first_token_that_was_sent_stands,
    answers_twice: checks.a_reservation_without_room_is_refused_or_answered_once_there_is,
    tells_no_end: checks.an_aborted_request_ends_at_once_and_once,
    ends_twice: checks.an_aborted_request_ends_at_once_and_once,
    never_frees: checks.an_aborted_prefill_keeps_its_blocks_until_nobody_reads_them,
    takes_anything: checks.what_could_never_run_is_refused_with_its_field,
    swallows_the_devices_failure: checks.a_device_that_fails_ends_the_engines_thread,
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_an_engine_that_breaks_the_contract_in_one_place_is_found_out(
    mutate: Callable[[Any], None],
) -> None:
    for tenant in TENANTS[1:]:
        check = MUTATIONS[mutate]
        check(tenant)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check(replace(tenant, change=mutate, wait_s=0.5))
