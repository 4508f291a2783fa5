"""A mixed pool's workers are split into roles, which the fleet shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.workers import RegistryConfig
from baton.errors import InvalidRequestError, NotFoundError
from baton.fleet import Role
from cluster.progress import Progress
from cluster.registry.registry import Registration, Registry
from cluster.role_plan import RolePlan, active_roles
from tests.cluster.pool_settings import settings_of

WORKERS = ("main-0", "main-1", "main-2", "main-10")


def registry_of(role: Role = Role.MIXED, num_workers: int = 4) -> Registry:
    registry = Registry(RegistryConfig(), lambda: 0.0)
    registry.pools.add(settings_of("main", role), num_workers)
    for number in range(num_workers):
        stream = registry.register(Registration(f"main-{number}", 1, "main", b""))
        assert stream is not None
        registry.heartbeat(stream, Progress(False, 0.0, None), b"", False)
    return registry


def roles_of(registry: Registry) -> list[Role | None]:
    workers = sorted(registry.workers(), key=lambda w: w.registration.worker_id)
    return [worker.active_role for worker in workers]


def test_prefill_has_the_lowest_slots_and_decode_the_highest() -> None:
    roles = active_roles(RolePlan(prefill=1, decode=2), WORKERS)
    assert [roles[name] for name in WORKERS] == [
        Role.PREFILL,
        Role.MIXED,
        Role.DECODE,
        Role.DECODE,
    ]


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))
def test_a_plan_is_kept_exactly_or_all_act_as_both(
    prefill: int, decode: int, num_workers: int
) -> None:
    names = [f"main-{number}" for number in range(num_workers)]
    found = list(active_roles(RolePlan(prefill, decode), names).values())
    for role in (Role.PREFILL, Role.DECODE):
        assert not names or {role, Role.MIXED} & {*found}, "nobody is left for this role"
    is_kept = (found.count(Role.PREFILL), found.count(Role.DECODE)) == (prefill, decode)
    leaves_both_roles = prefill + decode <= num_workers and max(prefill, decode) < num_workers
    assert is_kept if leaves_both_roles else found == [Role.MIXED] * num_workers


def test_from_three_to_one_to_one_to_three_two_workers_change() -> None:
    before = active_roles(RolePlan(3, 1), WORKERS)
    after = active_roles(RolePlan(1, 3), WORKERS)
    assert [name for name in WORKERS if before[name] != after[name]] == ["main-1", "main-2"]


def test_a_change_of_roles_is_a_new_version_of_the_fleet() -> None:
    registry = registry_of()
    assert roles_of(registry) == [None] * 4
    version = registry.refresh()
    registry.pools.set_role_plan("main", RolePlan(1, 3))
    assert roles_of(registry) == [Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE]
    assert registry.refresh() > version
    registry.pools.set_role_plan("main", RolePlan())
    assert roles_of(registry) == [None] * 4


def test_a_worker_that_leaves_takes_no_role_from_those_that_stay() -> None:
    registry = registry_of()
    registry.pools.set_role_plan("main", RolePlan(1, 2))
    registry.ask_drain("main-0")
    assert roles_of(registry) == [None, Role.PREFILL, Role.DECODE, Role.DECODE]


def test_once_the_worker_with_both_roles_leaves_the_others_have_both() -> None:
    registry = registry_of(num_workers=3)
    registry.pools.set_role_plan("main", RolePlan(prefill=2))
    assert roles_of(registry) == [Role.PREFILL, Role.PREFILL, Role.MIXED]
    registry.ask_drain("main-2")
    assert roles_of(registry) == [Role.MIXED, Role.MIXED, None]


def test_a_pool_of_one_role_is_not_split() -> None:
    with pytest.raises(InvalidRequestError, match="only a mixed pool"):
        registry_of(Role.DECODE).pools.set_role_plan("main", RolePlan(1, 1))


def test_a_plan_beyond_the_pools_bound_or_of_no_pool_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_replicas"):
        registry_of().pools.set_role_plan("main", RolePlan(5, 4))
    with pytest.raises(NotFoundError):
        registry_of().pools.set_role_plan("other", RolePlan(1, 1))
