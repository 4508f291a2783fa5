"""Tensor parallel: two real processes over gloo give the tokens of one."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from baton.config.engine import EngineConfig
from engine.errors import ShardingError
from engine.models.config import model_config
from engine.models.sharding import shard_of
from engine.request import StepPlan
from engine.run.build import load_model_spec
from engine.run.core import warm_up
from engine.run.tp import TpGroup, TpPeerError
from kv_transfer.layout import TensorSpec
from tests.engine import checkpoints, families, tp_rank
from tests.engine.driving import Driver, Setup, generate, random_prompt, set_up

CONFIG = EngineConfig(dtype="float32", num_blocks=200, num_threads=1)
QUICK = ("mistral", "qwen2", "qwen3-moe")


@contextmanager
def replica(
    folder: Path, size: int, config: EngineConfig = CONFIG
) -> Iterator[tuple[Setup, list[BaseProcess]]]:
    """Rank 0 here, the others as processes; all have ended at exit."""
    torch.set_num_threads(1)
    listening = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listening.getsockname()[1]}"
    spawn = multiprocessing.get_context("spawn")
    others = [
        spawn.Process(target=tp_rank.main, args=(str(folder), address, rank, size, config))
        for rank in range(1, size)
    ]
    for other in others:
        other.start()
    try:
        setup = set_up(folder, config, TpGroup.join(0, size, address, listening.detach()))
        try:
            yield setup, others
        finally:
            setup.runner.close()
    finally:
        for other in others:
            other.join(timeout=30)
            if other.is_alive():
                other.kill()
                other.join()


def check_two_ranks(family: str, tmp_path: Path) -> None:
    oracle = checkpoints.save(family, tmp_path)
    prompts = [random_prompt(n, families.VOCAB, n) for n in (1, 40, 131)]
    with replica(tmp_path, 2) as (setup, others):
        assert setup.spec == load_model_spec(str(tmp_path), CONFIG)
        found = generate(Driver(setup), prompts, 8, chunk=64)
        assert found == [checkpoints.greedy_answer(oracle, prompt, 8) for prompt in prompts]
    assert [other.exitcode for other in others] == [0]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.full)
        for name in families.FAMILIES
    ],
)
def test_two_ranks_give_the_oracles_tokens_and_one_ranks_fingerprint(
    family: str, tmp_path: Path
) -> None:
    check_two_ranks(family, tmp_path)


@pytest.mark.usefixtures("no_compiler")
def test_two_ranks_without_a_compiler_give_the_oracles_tokens(tmp_path: Path) -> None:
    check_two_ranks("mistral", tmp_path)


@pytest.mark.full
def test_four_ranks_replicate_two_kv_heads(tmp_path: Path) -> None:
    oracle = checkpoints.save("llama", tmp_path)
    prompts = [random_prompt(n, families.VOCAB, n) for n in (3, 70)]
    with replica(tmp_path, 4) as (setup, _):
        found = generate(Driver(setup), prompts, 8, chunk=64)
        assert found == [checkpoints.greedy_answer(oracle, prompt, 8) for prompt in prompts]


def test_all_ranks_warm_up_by_what_rank_0_runs(tmp_path: Path) -> None:
    oracle = checkpoints.save("mistral", tmp_path)
    tokens = random_prompt(40, families.VOCAB, 40)
    with replica(tmp_path, 2) as (setup, others):
        warm_up(CONFIG, setup.runner, setup.sink)
        (found,) = generate(Driver(setup), [tokens], 8, chunk=64)
        assert found == checkpoints.greedy_answer(oracle, tokens, 8)
    assert [other.exitcode for other in others] == [0]


def test_a_killed_rank_makes_the_next_step_raise_soon(tmp_path: Path) -> None:
    checkpoints.save("llama", tmp_path)
    begun = 0.0
    with pytest.raises(TpPeerError), replica(tmp_path, 2) as (setup, others):  # noqa: PT012
        generate(Driver(setup), [[1, 2, 3]], 2, chunk=64)
        others[0].kill()
        others[0].join()
        begun = time.monotonic()
        for _ in range(100):  # a send may still be buffered; a collective never succeeds
            generate(Driver(setup), [[1, 2, 3]], 2, chunk=64)
    assert time.monotonic() - begun < 15.0


def test_a_plan_longer_than_the_inline_part_arrives_whole(tmp_path: Path) -> None:
    checkpoints.save("llama", tmp_path)
    with replica(tmp_path, 2) as (setup, others):
        plan = StepPlan(1, (), sink_messages=(b"x" * 200_000, b"end"))
        assert setup.runner.run(plan, {}) == []
        assert setup.sink.calls[-1] == ("step_done",)
        driver = Driver(setup)  # the next plan is read from where this one ended
        assert len(generate(driver, [[5, 6]], 2, chunk=64)[0].ids) == 2
    assert others[0].exitcode == 0


def test_kv_heads_of_a_shard_are_those_of_the_layout() -> None:
    for kv_heads, heads in ((1, 8), (2, 8), (4, 8), (8, 8)):
        raw = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 100,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
        }
        spec = TensorSpec("k", kv_heads, 8, "float32")
        for size in (1, 2, 4, 8):
            shards = [shard_of(model_config(raw), rank, size) for rank in range(size)]
            assert [s.kv_heads for s in shards] == [
                spec.heads_of_rank(rank, size) for rank in range(size)
            ]
            assert [row for s in shards for row in s.vocab] == list(range(100))
        with pytest.raises(ShardingError, match="over 3 ranks"):
            shard_of(model_config(raw), 0, 3)
