"""`engine.dtype: auto` of a worker in a pod: it asks the registry before it loads anything."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.config.cluster import parse_config
from baton.config.engine import EngineConfig
from baton.config.workers import RegistryConfig
from baton.errors import UnavailableError
from cluster.pools.pool_settings import added_settings
from cluster.registry.control_service import Changes, serve
from cluster.registry.registry import Registry
from cluster.worker import rank
from cluster.worker.config import RankPosition, WorkerConfig, worker_config
from cluster.worker.rank import Rank, build_rank, free_port, with_agreed_dtype
from cluster.worker.reports import worker_info
from engine.api import EngineCapacity, ModelSpec
from engine.engines import engine_builder
from engine.run.torch_engine import TorchBuilder
from kv_transfer.layout import KvLayout, LayerGroup, TensorSpec
from kv_transfer.lease import RankAddress, WorkerIdentity
from kv_transfer.process import own_identity
from tests.identities import OPERATOR

POOLS = "pools: {p: {role: prefill}, d: {role: decode, engine: {device: cuda}}}\nruns_on: pods\n"


def config_of(folder: Path, control: str) -> WorkerConfig:
    """Of a worker whose model is named in float32: that is what it would compute in anywhere."""
    (folder / "config.json").write_text(json.dumps({"dtype": "float32"}))
    cluster = added_settings("p", POOLS + f"model: {folder}").config
    return worker_config(cluster, "p", "p-0", control)


def registry_of(*pools: str) -> Registry:
    registry = Registry(RegistryConfig(), time.monotonic)
    for pool in pools:
        registry.pools.add(added_settings(pool, POOLS), 1)
    return registry


async def agreed(config: WorkerConfig) -> str:
    reported = await asyncio.to_thread(
        with_agreed_dtype, config, config.cluster.model, engine_builder(config.engine)
    )
    assert reported == dataclasses.replace(
        config, engine=dataclasses.replace(config.engine, dtype=reported.engine.dtype)
    )
    return reported.engine.dtype


@pytest.mark.parametrize(
    ("others", "dtype", "reason"),
    [
        ("", "float32", "the checkpoint's own dtype"),
        ("float16", "float16", "agreed with the other workers; float32 by itself"),
    ],
    ids=["the first", "the next"],
)
async def test_the_first_worker_computes_in_its_own_dtype_and_the_next_one_in_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, others: str, dtype: str, reason: str
) -> None:
    async with serve(
        registry := registry_of("p", "d"), Changes(), "127.0.0.1:0", OPERATOR
    ) as control:
        if others:
            registry.pools.agree_dtype("d", others)
        with caplog.at_level("INFO", "cluster.worker.rank"):
            assert await agreed(config_of(tmp_path, control)) == dtype
    assert caplog.messages == [f"p computes in {dtype}: {reason}"]
    assert registry.pools.settings("d").dtype == dtype


async def test_a_registry_that_is_not_there_yet_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "_ASK_AGAIN_S", 0.01)
    control = f"127.0.0.1:{free_port('127.0.0.1')}"
    asking = asyncio.create_task(agreed(config_of(tmp_path, control)))
    await asyncio.wait({asking}, timeout=0.05)
    registry = registry_of()  # which does not know the pool yet either
    async with serve(registry, Changes(), control, OPERATOR):
        await asyncio.wait({asking}, timeout=0.05)
        registry.pools.add(added_settings("p", POOLS), 1)
        registry.pools.agree_dtype("p", "bfloat16")
        assert await asyncio.wait_for(asking, 10) == "bfloat16"


async def test_a_worker_whom_no_registry_answers_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "_AGREE_WITHIN_S", 0.0)
    with pytest.raises(UnavailableError, match=r"nothing listens at 127\.0\.0\.1:1"):
        await agreed(config_of(tmp_path, "127.0.0.1:1"))


@pytest.mark.parametrize(
    "change",
    [
        {"cluster": parse_config({"pools": {"p": {"role": "mixed"}}, "model": "fake"})},
        {"engine": EngineConfig(dtype="bfloat16")},
        {"engine": EngineConfig(backend="fake")},
    ],
)
def test_what_is_decided_or_computes_nothing_asks_nobody(
    change: dict[str, Any], tmp_path: Path
) -> None:
    config = dataclasses.replace(config_of(tmp_path, "127.0.0.1:1"), **change)
    builder = engine_builder(config.engine)
    assert with_agreed_dtype(config, config.cluster.model, builder) is config


@pytest.mark.parametrize("dtype", ["bfloat16", ""])
def test_a_worker_registers_the_dtype_that_it_computes_in(dtype: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, "127.0.0.1:1")
    tensors = (TensorSpec("k", 1, 8, "bfloat16"),)
    layout = KvLayout(16, (LayerGroup(0, 1, tensors),))
    spec = ModelSpec("m", layout, b"", b"", 9, 64, frozenset(), dtype)
    identity = WorkerIdentity("p-0", 1, (RankAddress(0, b"there", own_identity()),))
    loaded = SimpleNamespace(model=spec, identity=identity)
    capacity = EngineCapacity(4, 64, None, None)
    assert worker_info(config, cast(Rank, loaded), capacity, "here:1").dtype == dtype


async def test_a_rank_is_built_in_what_was_agreed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DescribedError(Exception):
        pass

    def describe(builder: TorchBuilder, model: str, engine: EngineConfig) -> ModelSpec:
        raise DescribedError(engine.dtype)

    monkeypatch.setattr(TorchBuilder, "describe", describe)
    async with serve(
        registry := registry_of("p", "d"), Changes(), "127.0.0.1:0", OPERATOR
    ) as control:
        registry.pools.agree_dtype("d", "float16")
        with pytest.raises(DescribedError, match="float16"):
            await asyncio.to_thread(build_rank, config_of(tmp_path, control), RankPosition())
