"""What is kept of the pools' book for a supervisor that starts again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from baton.config import ClusterConfig, PoolConfig
from cluster.pool_book import FIRST_WEIGHTS, PoolBook
from cluster.pool_settings import told_settings
from cluster.role_plan import Role, RolePlan
from cluster.supervisor_state import SupervisorState, state_file
from tests.cluster.pool_settings import told

CLUSTER = ClusterConfig(
    pools={"prefill": PoolConfig("prefill", 2), "both": PoolConfig("mixed", 3, max_replicas=3)}
)


def restored(run_dir: Path, cluster: ClusterConfig = CLUSTER) -> PoolBook:
    SupervisorState(run_dir, cluster).restore(book := PoolBook())
    return book


def kept(book: PoolBook, run_dir: Path) -> None:
    SupervisorState(run_dir, CLUSTER).keep("127.0.0.1:7", book)


def test_a_first_supervisor_begins_with_what_the_cluster_file_says(tmp_path: Path) -> None:
    book = restored(tmp_path)
    assert book.desired_replicas() == {"prefill": 2, "both": 3}
    assert book.cohort_weights() == FIRST_WEIGHTS
    assert not state_file(tmp_path).exists()


def test_what_was_told_of_a_pool_goes_before_a_file_that_names_it_later(tmp_path: Path) -> None:
    book = restored(tmp_path)
    book.add(told(), 2)
    kept(book, tmp_path)
    name = told().name
    later = dataclasses.replace(CLUSTER, pools={**CLUSTER.pools, name: PoolConfig("decode", 1)})
    assert restored(tmp_path, later).settings(name) == book.settings(name)


def test_all_that_was_told_of_pools_survives_a_restart(tmp_path: Path) -> None:
    book = restored(tmp_path)
    book.add(told(), 2)
    book.set_replicas("prefill", 0)
    book.remove("prefill")
    book.set_role_plan("both", RolePlan(1, 2))
    book.set_cohort_weights({"new": 7, "yet to come": 3})
    book.agree_dtype(told().name, "bfloat16")
    kept(book, tmp_path)
    again = restored(tmp_path)
    assert again.shown({}) == book.shown({})
    assert again.all_settings() == book.all_settings()
    assert again.cohort_weights() == book.cohort_weights()
    assert SupervisorState(tmp_path, CLUSTER).listen == "127.0.0.1:7"


def test_roles_that_are_away_or_on_their_way_back_are_so_after_a_restart(tmp_path: Path) -> None:
    book = restored(tmp_path)
    book.see_live({"prefill": 2, "both": 3})
    book.set_replicas("both", 0)
    book.see_live({"prefill": 2})
    book.set_replicas("both", 1)
    kept(book, tmp_path)
    again = restored(tmp_path)
    assert again.away == {Role.DECODE}
    assert again.shown({}) == book.shown({})
    again.see_live({"both": 1})
    assert again.away == set()
    kept(again, tmp_path)
    assert restored(tmp_path).away == set()  # its workers may have died: it comes not from zero


def test_a_role_that_went_when_nobody_looked_is_away_after_a_restart(tmp_path: Path) -> None:
    book = restored(tmp_path)
    book.set_replicas("both", 0)
    kept(book, tmp_path)
    again = restored(tmp_path)
    again.set_replicas("both", 1)
    again.see_live({})
    assert again.away == {Role.DECODE}


def test_a_pool_of_the_file_that_was_removed_and_told_anew_is_the_one_that_was_told(
    tmp_path: Path,
) -> None:
    book = restored(tmp_path)
    book.set_replicas("both", 0)
    book.remove("both")
    book.add(told_settings("both", "pools: {both: {role: decode}}", "new"), 1)
    kept(book, tmp_path)
    again = restored(tmp_path)
    assert (again.settings("both").role, again.settings("both").cohort) == (Role.DECODE, "new")
    again.set_replicas("both", 0)
    again.remove("both")
    kept(again, tmp_path)
    assert list(restored(tmp_path).all_settings()) == ["prefill"]


def test_a_file_of_an_older_supervisor_which_knew_sizes_alone_is_read(tmp_path: Path) -> None:
    older = {"listen": "127.0.0.1:9", "desired": {"prefill": 1, "both": 9, "gone": 4}}
    state_file(tmp_path).write_text(json.dumps(older))
    book = restored(tmp_path)
    assert book.desired_replicas() == {"prefill": 1, "both": 3}  # its bound is 3 by now
    assert book.cohort_weights() == FIRST_WEIGHTS
    assert [pool.cohort for pool in book.shown({})] == ["", ""]
    assert book.away == set()


def test_a_role_plan_that_suits_the_pool_no_more_is_given_up_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older = {"listen": "x:1", "desired": {}, "role_plans": {"prefill": {"prefill": 1, "decode": 1}}}
    state_file(tmp_path).write_text(json.dumps(older))
    assert restored(tmp_path).role_plans()["prefill"] == RolePlan()
    assert "prefill: its role plan is given up" in caplog.text


def test_a_told_pool_whose_text_is_read_no_more_is_given_up_and_the_others_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = restored(tmp_path)
    book.add(told(), 1)
    kept(book, tmp_path)
    found = json.loads(state_file(tmp_path).read_text())
    found["told_pools"]["decode-1b2c3"]["config"] = "no_such_key: 1"
    state_file(tmp_path).write_text(json.dumps(found))
    assert restored(tmp_path).desired_replicas() == {"prefill": 2, "both": 3}
    assert "decode-1b2c3: the pool is given up" in caplog.text
