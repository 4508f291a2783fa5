"""What a restarted supervisor knows of its pools."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from baton.config.cluster import ClusterConfig, PoolConfig
from baton.config.workers import RegistryConfig
from baton.errors import ConfigError
from baton.fleet import Role
from cluster.pools.pool_settings import added_settings
from cluster.pools.pool_table import PoolTable
from cluster.registry.registry import Registry
from cluster.registry.routers import Unit, UnitList
from cluster.role_plan import RolePlan
from cluster.supervisor.run_dir import SupervisorState, state_file
from tests.cluster.pool_settings import ADDED_TEXT, added_pool

CLUSTER = ClusterConfig(
    pools={
        "prefill": PoolConfig(Role.PREFILL, 2),
        "both": PoolConfig(Role.MIXED, 3, max_replicas=3),
    }
)


def restored(run_dir: Path, cluster: ClusterConfig = CLUSTER) -> PoolTable:
    SupervisorState(run_dir, cluster).restore(table := PoolTable())
    return table


def kept(table: PoolTable, run_dir: Path, units: UnitList | None = None) -> None:
    registry = Registry(
        RegistryConfig(), time.monotonic, model_fingerprint=b"model", units=units or UnitList()
    )
    registry.pools = table
    SupervisorState(run_dir, CLUSTER).keep("127.0.0.1:7", registry)


def test_set_units_survive_a_restart_and_the_clusters_own_unit_is_none_of_them(
    tmp_path: Path,
) -> None:
    own = dataclasses.replace(CLUSTER, unit="a")
    assert SupervisorState(tmp_path, own).units.all == (Unit("a"),)
    kept(restored(tmp_path), tmp_path, units=UnitList(Unit("former")))
    units = SupervisorState(tmp_path, own).units
    assert units.all == (Unit("a"),)
    units.set([Unit("a", "a:1", 0.25), Unit("b", "b:1", 0.75)])
    kept(restored(tmp_path), tmp_path, units)
    assert SupervisorState(tmp_path, own).units.all == units.all


def test_a_first_supervisor_begins_with_what_the_cluster_file_says(tmp_path: Path) -> None:
    table = restored(tmp_path)
    assert table.desired_replicas() == {"prefill": 2, "both": 3}
    assert not state_file(tmp_path).exists()


def test_an_added_pool_goes_before_a_file_that_names_it_later(tmp_path: Path) -> None:
    table = restored(tmp_path)
    table.add(added_pool(), 2)
    kept(table, tmp_path)
    name = added_pool().name
    later = dataclasses.replace(CLUSTER, pools={**CLUSTER.pools, name: PoolConfig(Role.DECODE, 1)})
    assert restored(tmp_path, later).settings(name) == table.settings(name)


def test_all_changes_of_pools_survive_a_restart(tmp_path: Path) -> None:
    table = restored(tmp_path)
    table.add(added_pool(), 2)
    table.set_replicas("prefill", 0)
    table.remove("prefill")
    table.set_role_plan("both", RolePlan(1, 2))
    table.agree_dtype(added_pool().name, "bfloat16")
    table.close_pods(["b", "a"])
    kept(table, tmp_path)
    again = restored(tmp_path)
    assert again.closed_pods == {"a", "b"}
    assert again.status() == table.status()
    assert again.all_settings() == table.all_settings()
    state = SupervisorState(tmp_path, CLUSTER)
    assert (state.listen, state.model_fingerprint) == ("127.0.0.1:7", b"model")


def test_roles_that_are_away_or_on_their_way_back_are_so_after_a_restart(tmp_path: Path) -> None:
    table = restored(tmp_path)
    table.set_live({"prefill": 2, "both": 3})
    table.set_replicas("both", 0)
    table.set_live({"prefill": 2})
    table.set_replicas("both", 1)
    kept(table, tmp_path)
    again = restored(tmp_path)
    assert again.away == {Role.DECODE}
    again.set_live({"prefill": 2})
    table.set_live({"prefill": 2})
    assert again.status() == table.status()
    again.set_live({"both": 1})
    assert again.away == set()
    kept(again, tmp_path)
    assert restored(tmp_path).away == set()  # its workers may have died: it comes not from zero


def test_a_role_that_went_when_nobody_looked_is_away_after_a_restart(tmp_path: Path) -> None:
    table = restored(tmp_path)
    table.set_live({"prefill": 2, "both": 3})
    table.set_replicas("both", 0)
    kept(table, tmp_path)
    again = restored(tmp_path)
    again.set_replicas("both", 1)
    again.set_live({})
    assert again.away == {Role.DECODE}


def test_a_pool_of_the_file_that_was_removed_and_added_again_is_the_added_one(
    tmp_path: Path,
) -> None:
    table = restored(tmp_path)
    table.set_replicas("both", 0)
    table.remove("both")
    table.add(added_settings("both", "pools: {both: {role: decode}}"), 1)
    kept(table, tmp_path)
    again = restored(tmp_path)
    assert again.settings("both").role is Role.DECODE
    again.set_replicas("both", 0)
    again.remove("both")
    kept(again, tmp_path)
    assert list(restored(tmp_path).all_settings()) == ["prefill"]


def test_a_pool_whose_bound_in_the_file_is_smaller_by_now_is_cut_to_it(tmp_path: Path) -> None:
    kept(restored(tmp_path), tmp_path)
    smaller = {**CLUSTER.pools, "both": PoolConfig(Role.MIXED, 1, max_replicas=2)}
    table = restored(tmp_path, dataclasses.replace(CLUSTER, pools=smaller))
    assert table.desired_replicas() == {"prefill": 2, "both": 2}


def test_the_file_is_written_once_also_where_nothing_differs_from_the_start(tmp_path: Path) -> None:
    cluster = dataclasses.replace(CLUSTER, runs_on="pods", pools={})
    state = SupervisorState(tmp_path, cluster)
    registry = Registry(RegistryConfig(), time.monotonic)
    state.restore(registry.pools)
    state.keep(state.listen, registry)
    assert state_file(tmp_path).exists()


def test_an_added_pool_of_another_model_than_the_file_names_by_now_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = restored(tmp_path)
    table.add(added_pool(), 1)
    kept(table, tmp_path)
    again = restored(tmp_path, dataclasses.replace(CLUSTER, tokenizer="org/t"))
    assert list(again.all_settings()) == ["prefill", "both"]
    assert "pool decode-1b2c3: tokenizer: must be org/t" in caplog.text


def test_no_pool_of_another_model_than_the_file_s_is_added_after_a_restart(tmp_path: Path) -> None:
    kept(restored(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match="model: must be"):
        restored(tmp_path).add(added_pool(ADDED_TEXT + "model: org/m"), 1)


def test_a_role_plan_that_no_longer_suits_its_pool_is_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = restored(tmp_path)
    table.set_role_plan("both", RolePlan(1, 1))
    kept(table, tmp_path)
    later = {**CLUSTER.pools, "both": PoolConfig(Role.DECODE, 1)}
    again = restored(tmp_path, dataclasses.replace(CLUSTER, pools=later))
    assert again.role_plans()["both"] == RolePlan()
    assert "both: its role plan is given up" in caplog.text
