"""The book of pools by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from baton.config.cluster import ClusterConfig, parse_config
from baton.errors import (
    AlreadyExistsError,
    ConfigError,
    InUseError,
    InvalidRequestError,
    NotFoundError,
)
from cluster.pools.pool_settings import (
    ModelSource,
    PoolSettings,
    added_settings,
    num_gpus_wanted,
    num_ranks,
)
from cluster.pools.pool_table import PoolTable
from cluster.pools.role_plan import Role
from tests.cluster.pool_settings import TOLD, settings_of, told


def book_of(*pools: PoolSettings, replicas: int = 0) -> PoolTable:
    book = PoolTable()
    for settings in pools:
        book.add(settings, replicas)
    return book


def coming_back(book: PoolTable, **live: int) -> list[str]:
    book.set_live(live)
    return [pool.name for pool in book.status() if pool.comes_back_for]


# --- pools that come back -------------------------------------------------------------------------


def test_a_pool_comes_back_from_zero_until_its_first_worker_is_live() -> None:
    book = book_of(settings_of("decode", Role.DECODE))
    assert coming_back(book) == []  # it is away, and nobody wants it back
    book.set_replicas("decode", 2)
    assert coming_back(book) == coming_back(book) == ["decode"]
    assert coming_back(book, decode=1) == []
    assert coming_back(book) == []  # it has died


def test_a_role_has_yet_to_come_until_its_first_worker_is_live_or_fails_to_start() -> None:
    pools = settings_of("prefill", Role.PREFILL), settings_of("decode", Role.DECODE)
    book = book_of(*pools, replicas=1)
    assert coming_back(book) == ["prefill", "decode"]
    assert coming_back(book, prefill=1) == ["decode"]
    book.record_failure("decode", "decode-0", "no room", served=False)
    assert coming_back(book) == []


def test_a_pool_that_fails_to_start_again_comes_back_no_more() -> None:
    book = book_of(settings_of("decode", Role.DECODE))
    coming_back(book)
    book.set_replicas("decode", 1)
    book.record_failure("decode", "decode-0", "no room", served=False)
    assert coming_back(book) == []


def test_a_role_is_away_only_when_all_pools_are_that_can_do_it() -> None:
    """And another pool than the one that went may bring it back."""
    book = book_of(settings_of("decode", Role.DECODE), settings_of("mixed", Role.MIXED))
    book.set_replicas("mixed", 1)
    coming_back(book, mixed=1)
    book.set_replicas("decode", 1)
    assert coming_back(book, mixed=1) == []
    for name in ("mixed", "decode"):
        book.set_replicas(name, 0)
    coming_back(book)
    book.add(settings_of("next", Role.DECODE), 1)
    assert coming_back(book) == ["next"]


def test_a_mixed_pool_comes_back_for_the_roles_alone_that_were_away() -> None:
    book = book_of(settings_of("mixed", Role.MIXED))
    book.add(settings_of("decode", Role.DECODE), 1)
    assert coming_back(book, decode=1) == []
    book.set_replicas("mixed", 1)
    assert coming_back(book, decode=1) == ["mixed"]
    (mixed, decode) = book.status()
    assert (mixed.comes_back_for, decode.comes_back_for) == ((Role.PREFILL,), ())


# --- settings that are told -----------------------------------------------------------------------


def test_a_told_pool_is_made_of_its_own_file_and_known_by_its_text() -> None:
    settings = told()
    assert (settings.role, settings.shape.max_replicas) == (Role.MIXED, 4)
    assert settings.digest == told().digest
    assert settings.digest != told(text=TOLD + "\n").digest


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
    book = PoolTable()
    if named_by == "the cluster's file":  # which may hold no pool
        book.bind_model(ModelSource.of(ClusterConfig()))
    else:
        book.add(settings_of(), 1)
    before = book.status()
    with pytest.raises(ConfigError, match=f"^pool decode-1b2c3: {key}: {message}") as caught:
        book.add(told(TOLD + line), 1)
    assert (caught.value.field, caught.value.grpc_status) == (key, "INVALID_ARGUMENT")
    assert book.status() == before
    book.add(told(TOLD + f"model: {Path('models/demo').resolve()}"), 1)  # the same folder


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("pools: {decode: {role: mixed}}", "pools", "no such pool; there are: decode"),
        ("pools: {decode-1b2c3: {role: mixed, engin: {}}}", "pools.decode-1b2c3.engin", "engine"),
        (TOLD + "engine: {num_blocks: -1}", "engine.num_blocks", "not -1"),
        (TOLD + "pools: {}", "pools", "pools"),
        ("pools: [", None, "not valid YAML: line"),
    ],
)
def test_a_told_file_that_is_wrong_is_refused_by_the_key_at_fault(
    text: str, field: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        told(text=text)
    assert caught.value.field == field
    assert caught.value.message.startswith("pool decode-1b2c3: ")


def test_on_pods_a_file_may_hold_a_prefill_pool_alone_or_none() -> None:
    for pools in ({}, {"prefill": {"role": "prefill"}}):
        config = parse_config({"runs_on": "pods", "pools": pools})
        assert parse_config(yaml.safe_load(config.to_yaml())) == config
    with pytest.raises(ConfigError, match="pools: need at least one of role decode"):
        parse_config({"pools": {"prefill": {"role": "prefill"}}})


# --- pools ----------------------------------------------------------------------------------------


def test_a_pool_that_is_told_again_stays_as_it_is_and_other_settings_are_refused() -> None:
    book = book_of(told(), replicas=2)
    version = book.version
    book.add(told(), 3)
    assert (book.desired_replicas(), book.version) == ({"decode-1b2c3": 2}, version)
    with pytest.raises(AlreadyExistsError) as caught:
        book.add(told(text=TOLD + "log_level: debug"), 2)
    assert caught.value.field == "pool"
    own = book_of(settings_of("decode-1b2c3"))
    with pytest.raises(AlreadyExistsError):
        own.add(told(), 2)


def test_a_new_pool_beyond_its_own_bound_is_refused_and_not_there() -> None:
    book = PoolTable()
    with pytest.raises(InvalidRequestError, match=r"between 0 and 4.* not 5") as caught:
        book.add(told(), 5)
    assert caught.value.field == "replicas"
    with pytest.raises(NotFoundError, match="there are: none"):
        book.settings("decode-1b2c3")


def test_a_pool_is_removed_only_without_a_size_a_place_or_a_worker() -> None:
    book, name, worker = book_of(told(), replicas=1), "decode-1b2c3", "decode-1b2c3-0"
    book.open_slot(name, worker)
    with pytest.raises(InUseError, match="has 1 replicas"):
        book.remove(name)
    book.set_replicas(name, 0)
    with pytest.raises(InUseError, match=f"still has workers: {worker}"):
        book.remove(name)
    book.close_slot(worker)
    with pytest.raises(InUseError, match="workers: left-0"):
        book.remove(name, workers=["left-0"])
    book.record_failure(name, worker, "bad luck", served=False)
    version = book.version
    book.remove(name)
    assert (book.status(), book.version) == ((), version + 1)
    with pytest.raises(NotFoundError):
        book.remove(name)
    book.add(told(), 1)
    assert [(pool.last_error, pool.slots) for pool in book.status()] == [("", ())]


def test_ranks_and_gpus_are_counted_by_every_pools_own_settings() -> None:
    on_gpus = told(text=TOLD + "engine: {device: cuda}")
    pools = {"decode": settings_of("decode"), on_gpus.name: on_gpus}
    assert num_ranks(pools, {"decode": 3, on_gpus.name: 2}) == 3 + 2 * 2
    assert num_gpus_wanted(pools, {"decode": 3, on_gpus.name: 2}) == 2 * 2
    assert num_ranks(pools, {on_gpus.name: 1}) == 2


# --- places ---------------------------------------------------------------------------------------


def test_a_place_is_told_from_its_opening_with_its_pod_as_soon_as_it_has_one() -> None:
    book = book_of(settings_of("decode"), replicas=2)
    versions = [book.version]

    def shown() -> list[tuple[str, str | None, bool]]:
        versions.append(book.version)
        (pool,) = book.status()
        return [(each.worker_id, each.pod_name, each.is_pending) for each in pool.slots]

    book.open_slot("decode", "decode-0")
    assert shown() == [("decode-0", None, False)]
    assert book.set_pending("decode-0")
    assert not book.set_pending("decode-0")
    assert shown() == [("decode-0", None, True)]
    assert book.set_pod("decode-0", "pod-a")
    assert not book.set_pod("decode-0", "pod-a")
    assert shown() == [("decode-0", "pod-a", False)]
    book.close_slot("decode-0")
    assert shown() == []
    assert len(set(versions)) == len(versions)  # each is news


# --- what they compute in -------------------------------------------------------------------------


def torch_pool(name: str, dtype: str = "auto") -> PoolSettings:
    return added_settings(name, f"pools: {{{name}: {{role: mixed, engine: {{dtype: {dtype}}}}}}}")


def dtypes(book: PoolTable) -> dict[str, str]:
    pools = book.all_settings().items()
    return {name: settings.config.pool_engine(name).dtype for name, settings in pools}


def test_the_first_proposal_decides_for_all_pools() -> None:
    book = book_of(torch_pool("p"), torch_pool("d"))
    assert book.agree_dtype("p", "bfloat16") == "bfloat16"
    assert book.agree_dtype("d", "float32") == "bfloat16"
    assert dtypes(book) == {"p": "bfloat16", "d": "bfloat16"}
    assert book.knows(torch_pool("p"))  # told again, it is the same pool


def test_a_pool_that_names_its_dtype_goes_before_a_proposal() -> None:
    book = book_of(torch_pool("p"), torch_pool("d", dtype="float16"))
    assert book.agree_dtype("p", "bfloat16") == "float16"
    assert book.agree_dtype("d", "bfloat16") == "float16"


def test_what_cannot_be_computed_in_is_no_answer() -> None:
    book = book_of(torch_pool("p"))
    for dtype in ("auto", "int8", ""):
        with pytest.raises(InvalidRequestError) as caught:
            book.agree_dtype("p", dtype)
        assert caught.value.field == "dtype"
    with pytest.raises(NotFoundError):
        book.agree_dtype("nobody", "float32")
    assert dtypes(book) == {"p": "auto"}
