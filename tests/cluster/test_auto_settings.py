"""`auto` is decided once for all pools, before any worker gets its settings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from baton.config.cluster import ClusterConfig, parse_config
from baton.errors import ConfigError
from cluster.pools.pool_settings import choose_auto_settings


def cluster(model: Path, engine: dict[str, Any], prefill: dict[str, Any]) -> ClusterConfig:
    return parse_config(
        {
            "model": str(model),
            "engine": engine,
            "pools": {"p": {"role": "prefill", "engine": prefill}, "d": {"role": "decode"}},
        }
    )


def dtypes(config: ClusterConfig) -> list[str]:
    return [config.pool_engine(pool).dtype for pool in ("p", "d")]


def test_all_pools_get_one_dtype_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    config = cluster(tmp_path, {}, {"dtype": "auto", "max_num_seqs": 3})
    config, reported = choose_auto_settings(config)
    assert dtypes(config) == ["float32", "float32"]
    assert config.pool_engine("p").max_num_seqs == 3
    assert reported[1:] == ["computing in float32: the checkpoint's own dtype"]


def test_a_model_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        choose_auto_settings(cluster(tmp_path, {}, {}))


def test_a_model_whose_folder_is_on_the_workers_pods_alone_is_left_to_them(tmp_path: Path) -> None:
    named = dataclasses.replace(cluster(tmp_path / "none", {}, {}), runs_on="pods")
    config, reported = choose_auto_settings(named)
    assert (dtypes(config), reported) == (["auto", "auto"], [])


@pytest.mark.parametrize(
    ("engine", "prefill", "found"),
    [
        ({"dtype": "bfloat16", "device": "cpu"}, {}, ["bfloat16", "bfloat16"]),
        ({"dtype": "float32", "device": "cuda"}, {"dtype": "float32"}, ["float32", "float32"]),
        ({"backend": "fake"}, {}, ["auto", "auto"]),
    ],
)
def test_what_is_said_explicitly_stays_and_starts_nothing(
    engine: dict[str, Any], prefill: dict[str, Any], found: list[str], tmp_path: Path
) -> None:
    config, reported = choose_auto_settings(cluster(tmp_path / "none", engine, prefill))
    assert dtypes(config) == found
    assert reported == []


@pytest.mark.parametrize(("decode", "said"), [("auto", "float32"), ("float16", "float16")])
def test_a_prefill_pool_whose_dtype_no_other_pool_has_is_refused(
    decode: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    config = cluster(tmp_path, {"dtype": decode}, {"dtype": "bfloat16"})
    with pytest.raises(ConfigError) as caught:
        choose_auto_settings(config)
    assert caught.value.message.startswith(f"engine.dtype is bfloat16 in pool p, {said} in pool d:")
