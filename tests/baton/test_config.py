"""Cluster files: defaults, round trips, and errors that say what to write instead."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.config import settings
from baton.config.cluster import ClusterConfig, PoolConfig, load_config, parse_config
from baton.config.engine import EngineConfig
from baton.config.router import RouterConfig
from baton.config.settings import changed
from baton.errors import ConfigError
from baton.fleet import Role
from cluster.supervisor.supervisor import Supervision
from cluster.worker.config import worker_config


def test_nothing_at_all_is_one_prefill_and_one_decode_worker_of_the_demo_model() -> None:
    config = parse_config(None)
    assert config == ClusterConfig()
    roles = {name: (pool.role, pool.replicas) for name, pool in config.pools.items()}
    assert roles == {"prefill": ("prefill", 1), "decode": ("decode", 1)}
    assert (config.model, config.model_name) == ("models/demo", "demo")
    assert (config.router.port, config.control.port) == (7100, 7101)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"modle": "x"}, "modle: unknown key; did you mean 'model'?"),
        (
            {"qqqq": 1},
            "qqqq: unknown key; valid keys: control, decode, engine, internal, log_format",
        ),
        ({"engine": {"block_size": "3"}}, "engine.block_size: a whole number is expected, not '3'"),
        ({"engine": {"block_size": True}}, "engine.block_size: a whole number is expected"),
        ({"engine": {"block_size": 0}}, "engine.block_size: must be at least 1, not 0"),
        ({"engine": {"dtype": "fp32"}}, "engine.dtype: must be one of auto, bfloat16, float16, fl"),
        ({"engine": {"prefix_cache": "no"}}, "engine.prefix_cache: true or false is expected"),
        ({"engine": 3}, "engine: a mapping is expected, not 3"),
        ({"router": {"port": None}}, "router.port: a whole number is expected, not nothing"),
        (
            {"router": {"admission": {"lease_lead_s": "soon"}}},
            "router.admission.lease_lead_s: a number is expected",
        ),
        (
            {"router": {"admission": {"lease_lead_s": float("nan")}}},
            "router.admission.lease_lead_s: must be a finite number",
        ),
        ({"transfer": {"transport": "tcp"}}, "transfer.transport: must be one of ucx, memory"),
        ({"transfer": {"transport": "memory"}}, "transfer.transport: must be ucx in a cluster"),
        ({"control": {"port": 70000}}, "control.port: must be between 0 and 65535"),
        ({"log_level": "inf"}, "must be one of debug, info, warning, error, not 'inf'; did you"),
        ({"pools": []}, "pools: a mapping is expected"),
        ({"pools": {"a": {"replicas": 1}}}, "pools.a.role: is needed"),
        ({"pools": {"a": {"role": "decod"}}}, "pools.a.role: must be one of"),
        ({"pools": {"a": {"role": "prefill"}}}, "pools: need at least one of role decode or mixed"),
        ({"pools": {"a": {"role": "decode", "replicas": -1}}}, "pools.a.replicas: must be between"),
        (
            {"pools": {"a": {"role": "decode", "replicas": 5, "max_replicas": 4}}},
            "pools.a.replicas: must be between 0 and max_replicas (4), not 5",
        ),
        (
            {"pools": {"a": {"role": "decode", "engine": {"max_num_seqs": 1000}}}},
            "pools.a.engine.max_num_batched_tokens: must be at least max_num_seqs (1000), not 512",
        ),
        ({"pools": {"a b": {"role": "decode"}}}, "pools.a b: a pool's name is"),
        (
            {"router": {"links": {"keepalive_s": 3e6}}},
            "router.links.keepalive_s: must be between 0 and 86400",
        ),
        (
            {"router": {"clients": {"max_message_bytes": 1 << 40}}},
            "router.clients.max_message_bytes: must be between",
        ),
        (
            {
                "pools": {"a": {"role": "decode"}},
                "router": {"placement": {"local_prefill": "never"}},
            },
            "router.placement.local_prefill: must not be never without a pool of role prefill or "
            "mixed",
        ),
        (
            {"runs_on": "pods", "control": {"host": "0.0.0.0"}},
            "control.announced_host: is needed where runs_on is pods and control.host is 0.0.0.0",
        ),
        ({"control": {"announced_host": ""}}, "control.announced_host: must not be empty"),
        ([1], "cluster.yaml: a mapping is expected, not [1]"),
        ({"model": ""}, "model: must not be empty"),
    ],
)
def test_a_mistake_names_file_key_and_what_is_valid(value: object, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(value, source="cluster.yaml")
    assert caught.value.message.startswith("cluster.yaml: ")
    assert problem in caught.value.message


def sections(cls: type, key: str = "") -> Iterator[tuple[str, type]]:
    """The dotted key and the class of every section below `cls`, itself first."""
    yield key, cls
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            yield from sections(typing.cast(type, kind), f"{key}.{name}" if key else name)


SECTIONS = [*sections(ClusterConfig), ("pools.a", PoolConfig), ("pools.a.engine", EngineConfig)]


def nested(key: str, value: object) -> object:
    """What a YAML file with `value` at a dotted key holds."""
    for name in reversed(key.split(".") if key else []):
        value = {name: value}
    if key.startswith("pools.a"):
        typing.cast(Any, value)["pools"]["a"].setdefault("role", "mixed")
    return value


@pytest.mark.parametrize(("key", "cls"), SECTIONS, ids=lambda value: str(value))
def test_every_misspelt_key_is_named_with_the_nearest_valid_one(key: str, cls: type) -> None:
    names = [field.name for field in dataclasses.fields(cls)]
    for name in names:
        misspelt = name[:2] + name[3:]
        with pytest.raises(ConfigError) as caught:
            parse_config(nested(key, {misspelt: 1}))
        where = f"{key}.{misspelt}" if key else misspelt
        assert f": {where}: unknown key; did you mean '{name}'?" in caught.value.message


@pytest.mark.parametrize("wrong", [-1, -0.5, float("inf")])
@pytest.mark.parametrize(("key", "cls"), SECTIONS, ids=lambda value: str(value))
def test_every_number_out_of_range_is_named_with_its_section(
    key: str, cls: type, wrong: float
) -> None:
    for name, kind in typing.get_type_hints(cls).items():
        kinds = {kind, *typing.get_args(kind)}
        if type(wrong) not in kinds or name == "most_urgent_priority":
            continue
        with pytest.raises(ConfigError) as caught:
            parse_config(nested(key, {name: wrong}))
        assert caught.value.field == (f"{key}.{name}" if key else name)


def is_text(kind: Any) -> bool:
    return kind in (str, str | None) or typing.get_origin(kind) is typing.Literal


NO = "false: YAML reads no and off so unless they are quoted"
YES = "true: YAML reads yes and on so unless they are quoted"


@pytest.mark.parametrize(("word", "reported"), [("no", NO), ("off", NO), ("yes", YES), ("on", YES)])
def test_a_word_that_yaml_takes_for_true_or_false_is_reported_where_text_is_wanted(
    word: str, reported: str, tmp_path: Path
) -> None:
    keys = {
        f"{section}.{name}" if section else name
        for section, cls in SECTIONS
        for name, kind in typing.get_type_hints(cls).items()
        if is_text(kind)
    }
    assert {
        "router.placement.local_prefill",
        "transfer.checksum",
        "pools.a.engine.dtype",
        "model",
    } <= keys
    for key in keys:
        file = tmp_path / "cluster.yaml"
        file.write_text(yaml.safe_dump(nested(key, "WORD")).replace("WORD", word))
        with pytest.raises(ConfigError) as caught:
            load_config(file)
        assert caught.value.field == key
        assert caught.value.message.endswith(f", not {reported}")
        assert "did you mean" not in caught.value.message


def test_a_pool_that_yaml_takes_for_true_or_false_is_reported(tmp_path: Path) -> None:
    (file := tmp_path / "cluster.yaml").write_text("pools: {on: {role: mixed}}")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert caught.value.message == f"{file}: pools: a name is expected, not {YES}"


def test_the_words_themselves_are_read_when_they_are_quoted(tmp_path: Path) -> None:
    (file := tmp_path / "cluster.yaml").write_text("transfer: {checksum: 'off'}")
    assert load_config(file).transfer.checksum == "off"


def test_what_the_file_sets_reaches_the_workers() -> None:
    config = parse_config(
        {
            "worker": {"drain_timeout_s": 7, "metrics_port": None},
            "decode": {"orphan_ttl_s": 5},
            "transfer": {"checksum": "always"},
            "log_level": "debug",
        }
    )
    reported = worker_config(config, "decode", "decode-0", "127.0.0.1:1")
    assert (reported.settings, reported.cluster.decode) == (config.worker, config.decode)
    assert (reported.settings.drain_timeout_s, reported.settings.metrics_port) == (7.0, None)
    assert (reported.cluster.decode.orphan_ttl_s, reported.cluster.log_level) == (5.0, "debug")
    assert (reported.transfer.checksum, reported.transfer.net_devices) == ("always", "lo")


def test_what_the_file_sets_reaches_the_supervisor_and_its_registry(tmp_path: Path) -> None:
    config = parse_config({"registry": {"gone_after_s": 40}, "supervisor": {"fence_after_s": 3}})
    supervision = Supervision(config, tmp_path)
    registry = supervision._context.registry
    assert registry.pools.settings("decode").config.supervisor == config.supervisor
    assert registry.config == config.registry


def test_a_configuration_is_read_back_from_its_own_yaml() -> None:
    config = ClusterConfig(
        model="/models/llama",
        served_model_name="llama",
        log_level="debug",
        pools={
            "prefill": PoolConfig(role=Role.PREFILL, replicas=2),
            "decode": PoolConfig(role=Role.DECODE, tensor_parallel=2, engine={"max_num_seqs": 8}),
        },
        engine=EngineConfig(dtype="float32", num_blocks=100),
        router=changed(RouterConfig(), port=0, placement={"local_prefill": "never"}),
    )
    text = config.to_yaml()
    assert parse_config(yaml.safe_load(text)) == config
    assert parse_config(yaml.safe_load(ClusterConfig().to_yaml())) == ClusterConfig()
    assert "block_size" not in text  # what is left at its default is not written


def test_a_pools_engine_is_the_clusters_with_its_own_settings_over_it() -> None:
    config = parse_config(
        {
            "engine": {"max_num_seqs": 4, "dtype": "float32"},
            "pools": {
                "a": {"role": "mixed", "engine": {"max_num_seqs": 9}},
                "b": {"role": "mixed"},
            },
        }
    )
    assert config.pool_engine("a") == dataclasses.replace(config.engine, max_num_seqs=9)
    assert config.pool_engine("b") == config.engine


def test_a_relative_model_folder_is_the_one_beside_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("elsewhere/weights", "weights"):
        (tmp_path / place).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")  # which has one of the same name
    file = tmp_path / "cluster.yaml"
    file.write_text("model: weights\nserved_model_name: [mine, other]\ntokenizer: weights\n")
    config = load_config(file)
    assert config.tokenizer == str(tmp_path / "weights")
    assert config.with_absolute_folders() == config
    assert config.model == str(tmp_path / "weights")
    assert (config.model_name, config.model_names) == ("mine", ("mine", "other"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("a: 1\nb: [\n", "not valid YAML: line 3: expected the node content"),
        ("a: 1\n\tb: 2", "not valid YAML: line 2: found character '\\\\t' that cannot start"),
        ("a: \x00", "not valid YAML: unacceptable character"),
        (None, "cannot be read: No such file"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: str | None, problem: str) -> None:
    file = tmp_path / "cluster.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"cluster.yaml: {problem}"):
        load_config(file)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("router: {port: 1}\nmodel: m\nrouter: {}\n", "router is given twice, in lines 1 and 3"),
        ("router:\n  port: 1\n  port: 2\n", "port is given twice, in lines 2 and 3"),
        ("pools:\n- {a: 1}\n- {b: 1, b: 2}\n", "b is given twice, in lines 3 and 3"),
    ],
)  # fmt: skip
def test_a_key_that_is_given_twice_is_named_with_its_lines(
    tmp_path: Path, content: str, problem: str
) -> None:
    (file := tmp_path / "cluster.yaml").write_text(content)
    with pytest.raises(ConfigError, match=f"cluster.yaml: {problem}"):
        load_config(file)


def test_what_an_anchor_merges_in_may_be_given_again(tmp_path: Path) -> None:
    (file := tmp_path / "cluster.yaml").write_text(
        "pools:\n"
        "  decode: &decode {role: decode, replicas: 2}\n"
        "  large: &large {<<: *decode, replicas: 3}\n"
        "  larger: {<<: *large, replicas: 4}\n"
    )
    pools = load_config(file).pools
    assert [pool.replicas for pool in pools.values()] == [2, 3, 4]


@dataclasses.dataclass(frozen=True)
class Inner:
    items: tuple[int, ...] = ()
    choice: str | None = None


@dataclasses.dataclass(frozen=True)
class Outer:
    needed: float
    inner: Inner = Inner()


def test_any_dataclass_can_be_read_and_written() -> None:
    value = {"needed": 1, "inner": {"items": [1, 2], "choice": None}}
    config = settings.parse(Outer, value, source="x")
    assert config == Outer(1.0, Inner((1, 2), None))
    assert settings.parse(Outer, settings.dump(config), source="x") == config
    with pytest.raises(ConfigError, match=r"x: inner\.items\[1\]: a whole number"):
        settings.parse(Outer, {"needed": 1, "inner": {"items": [1, "b"]}}, source="x")
    with pytest.raises(ConfigError, match="x: needed: is needed"):
        settings.parse(Outer, {}, source="x")


# --- times that must fit each other ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "key", "problem"),
    [
        (
            {"worker": {"drain_timeout_s": 90}},
            "supervisor.drain_timeout_s",
            "must be above worker.drain_timeout_s (90), not 60",
        ),
        (
            {"registry": {"silent_after_s": 0.2}},
            "registry.silent_after_s",
            "must be above worker.heartbeat_s (0.3), not 0.2",
        ),
        (
            {"supervisor": {"fence_after_s": 12}},
            "registry.gone_after_s",
            "supervisor.fence_after_s (15), not 15",
        ),
        (
            {"registry": {"first_step_s": 150}},
            "router.timeouts.first_token_s",
            "must be above registry.first_step_s (150), not 150",
        ),
        (
            {"transfer": {"tombstone_s": 3605}},
            "transfer.tombstone_s",
            "must be above router.timeouts.reserve_s + router.timeouts.max_s (3605), not 3605",
        ),
    ],
)
def test_one_part_outlasts_another_where_it_must(value: object, key: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(value)
    assert caught.value.field == key
    assert problem in caught.value.message


def test_a_pools_own_drain_is_not_cut_short_either() -> None:
    pools = {"decode": {"role": "decode", "drain_timeout_s": 90}, "prefill": {"role": "prefill"}}
    with pytest.raises(ConfigError, match=r"pools\.decode\.drain_timeout_s \(90\)"):
        parse_config({"pools": pools})
    config = parse_config({"pools": pools, "supervisor": {"drain_timeout_s": 100}})
    drains = {
        pool: worker_config(config, pool, f"{pool}-0", "127.0.0.1:1").settings.drain_timeout_s
        for pool in pools
    }
    assert drains == {"decode": 90.0, "prefill": 30.0}
