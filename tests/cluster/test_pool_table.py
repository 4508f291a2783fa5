"""The pool table by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from baton.config.cluster import ClusterConfig, parse_config
from baton.errors import (
    AlreadyExistsError,
    ConfigError,
    InUseError,
    NotFoundError,
)
from baton.fleet import Role
from cluster.pools.pool_settings import (
    ModelSource,
    PoolSettings,
    added_settings,
    num_gpus_wanted,
    num_ranks,
)
from cluster.pools.pool_table import PoolTable
from tests.cluster.pool_settings import ADDED_TEXT, added_pool, settings_of


def table_of(*pools: PoolSettings, replicas: int = 0) -> PoolTable:
    table = PoolTable()
    for settings in pools:
        table.add(settings, replicas)
    return table


def coming_back(table: PoolTable, **live: int) -> list[str]:
    table.set_live(live)
    return [pool.name for pool in table.status() if pool.comes_back_for]


# --- pools that come back -------------------------------------------------------------------------


def test_a_pool_comes_back_from_zero_until_its_first_worker_is_live() -> None:
    table = table_of(settings_of("decode", Role.DECODE))
    assert coming_back(table) == []  # it is away, and nobody wants it back
    table.set_replicas("decode", 2)
    assert coming_back(table) == coming_back(table) == ["decode"]
    assert coming_back(table, decode=1) == []
    assert coming_back(table) == []  # it has died


def test_a_role_has_yet_to_come_until_its_first_worker_is_live_or_fails_to_start() -> None:
    pools = settings_of("prefill", Role.PREFILL), settings_of("decode", Role.DECODE)
    table = table_of(*pools, replicas=1)
    assert coming_back(table) == ["prefill", "decode"]
    assert coming_back(table, prefill=1) == ["decode"]
    table.record_failure("decode", "decode-0", "no room", served=False)
    assert coming_back(table) == []


def test_a_role_is_away_only_when_all_pools_are_that_can_do_it() -> None:
    """And another pool than the one that went may bring it back."""
    table = table_of(settings_of("decode", Role.DECODE), settings_of("mixed", Role.MIXED))
    table.set_replicas("mixed", 1)
    coming_back(table, mixed=1)
    table.set_replicas("decode", 1)
    assert coming_back(table, mixed=1) == []
    for name in ("mixed", "decode"):
        table.set_replicas(name, 0)
    coming_back(table)
    table.add(settings_of("next", Role.DECODE), 1)
    assert coming_back(table) == ["next"]


def test_a_mixed_pool_comes_back_for_the_roles_alone_that_were_away() -> None:
    table = table_of(settings_of("mixed", Role.MIXED))
    table.add(settings_of("decode", Role.DECODE), 1)
    assert coming_back(table, decode=1) == []
    table.set_replicas("mixed", 1)
    assert coming_back(table, decode=1) == ["mixed"]
    (mixed, decode) = table.status()
    assert (mixed.comes_back_for, decode.comes_back_for) == ((Role.PREFILL,), ())


# --- settings of added pools ----------------------------------------------------------------------


def test_an_added_pool_is_made_of_its_own_file_and_known_by_its_text() -> None:
    settings = added_pool()
    assert (settings.role, settings.shape.max_replicas) == (Role.MIXED, 4)
    assert settings.digest == added_pool().digest
    assert settings.digest != added_pool(text=ADDED_TEXT + "\n").digest


OTHER_MODELS = [
    ("model: org/m", "model", r"must be .*models/demo, .* not org/m"),
    ("model_revision: v2", "model_revision", "must be unset, .* not v2"),
    ("tokenizer: org/t", "tokenizer", "must be unset, .* not org/t"),
]


@pytest.mark.parametrize(("line", "key", "message"), OTHER_MODELS)
@pytest.mark.parametrize("named_by", ["the cluster's file", "the first pool"])
def test_a_pool_of_another_model_is_refused_by_its_key(
    line: str, key: str, message: str, named_by: str
) -> None:
    table = PoolTable()
    if named_by == "the cluster's file":  # which may hold no pool
        table.bind_model(ModelSource.of(ClusterConfig()))
    else:
        table.add(settings_of(), 1)
    before = table.status()
    with pytest.raises(ConfigError, match=f"^pool decode-1b2c3: {key}: {message}") as caught:
        table.add(added_pool(ADDED_TEXT + line), 1)
    assert (caught.value.field, caught.value.grpc_status) == (key, "INVALID_ARGUMENT")
    assert table.status() == before
    table.add(
        added_pool(ADDED_TEXT + f"model: {Path('models/demo').resolve()}"), 1
    )  # the same folder


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("pools: {decode: {role: mixed}}", "pools", "no such pool; there are: decode"),
        ("pools: {decode-1b2c3: {role: mixed, engin: {}}}", "pools.decode-1b2c3.engin", "engine"),
        (ADDED_TEXT + "engine: {num_blocks: -1}", "engine.num_blocks", "not -1"),
        (ADDED_TEXT + "pools: {}", "pools", "pools"),
        ("pools: [", None, "not valid YAML: line"),
    ],
)
def test_a_wrong_file_of_an_added_pool_is_refused_by_the_key_at_fault(
    text: str, field: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        added_pool(text=text)
    assert caught.value.field == field
    assert caught.value.message.startswith("pool decode-1b2c3: ")


def test_on_pods_a_file_may_hold_a_prefill_pool_alone_or_none() -> None:
    for pools in ({}, {"prefill": {"role": "prefill"}}):
        config = parse_config({"runs_on": "pods", "pools": pools})
        assert parse_config(yaml.safe_load(config.to_yaml())) == config
    with pytest.raises(ConfigError, match="pools: need at least one of role decode"):
        parse_config({"pools": {"prefill": {"role": "prefill"}}})


# --- pools ----------------------------------------------------------------------------------------


def test_a_pool_that_is_added_again_stays_as_it_is_and_other_settings_are_refused() -> None:
    table = table_of(added_pool(), replicas=2)
    version = table.version
    table.add(added_pool(), 3)
    assert (table.desired_replicas(), table.version) == ({"decode-1b2c3": 2}, version)
    with pytest.raises(AlreadyExistsError) as caught:
        table.add(added_pool(text=ADDED_TEXT + "log_level: debug"), 2)
    assert caught.value.field == "pool"
    own = table_of(settings_of("decode-1b2c3"))
    with pytest.raises(AlreadyExistsError):
        own.add(added_pool(), 2)


def test_a_pool_is_removed_only_without_a_size_a_slot_or_a_worker() -> None:
    table, name, worker = table_of(added_pool(), replicas=1), "decode-1b2c3", "decode-1b2c3-0"
    table.open_slot(name, worker)
    with pytest.raises(InUseError, match="has 1 replicas"):
        table.remove(name)
    table.set_replicas(name, 0)
    with pytest.raises(InUseError, match=f"still has workers: {worker}"):
        table.remove(name)
    table.close_slot(worker)
    with pytest.raises(InUseError, match="workers: left-0"):
        table.remove(name, workers=["left-0"])
    table.record_failure(name, worker, "bad luck", served=False)
    version = table.version
    table.remove(name)
    assert (table.status(), table.version) == ((), version + 1)
    with pytest.raises(NotFoundError):
        table.remove(name)
    table.add(added_pool(), 1)
    assert [(pool.last_error, pool.slots) for pool in table.status()] == [("", ())]


def test_ranks_and_gpus_are_counted_by_every_pools_own_settings() -> None:
    on_gpus = added_pool(text=ADDED_TEXT + "engine: {device: cuda}")
    pools = {"decode": settings_of("decode"), on_gpus.name: on_gpus}
    assert num_ranks(pools, {"decode": 3, on_gpus.name: 2}) == 3 + 2 * 2
    assert num_gpus_wanted(pools, {"decode": 3, on_gpus.name: 2}) == 2 * 2
    assert num_ranks(pools, {on_gpus.name: 1}) == 2


# --- places ---------------------------------------------------------------------------------------


def test_a_slot_is_shown_from_its_opening_with_its_pod_as_soon_as_it_has_one() -> None:
    table = table_of(settings_of("decode"), replicas=2)
    versions = [table.version]

    def shown() -> list[tuple[str, str | None, bool]]:
        versions.append(table.version)
        (pool,) = table.status()
        return [(each.worker_id, each.pod_name, each.is_pending) for each in pool.slots]

    table.open_slot("decode", "decode-0")
    assert shown() == [("decode-0", None, False)]
    assert table.update_slot("decode-0", is_pending=True)
    assert shown() == [("decode-0", None, True)]
    table.update_slot("decode-0", pod_name="pod-a", is_pending=False)
    assert shown() == [("decode-0", "pod-a", False)]
    assert not table.update_slot("decode-0", pod_name="pod-a")
    assert table.version == versions[-1]
    table.close_slot("decode-0")
    assert shown() == []
    assert len(set(versions)) == len(versions)  # each is news


# --- what they compute in -------------------------------------------------------------------------


def torch_pool(name: str, dtype: str = "auto") -> PoolSettings:
    return added_settings(name, f"pools: {{{name}: {{role: mixed, engine: {{dtype: {dtype}}}}}}}")


def test_a_pool_that_names_its_dtype_goes_before_a_proposal() -> None:
    table = table_of(torch_pool("p"), torch_pool("d", dtype="float16"))
    assert table.agree_dtype("p", "bfloat16") == "float16"
    assert table.agree_dtype("d", "bfloat16") == "float16"
