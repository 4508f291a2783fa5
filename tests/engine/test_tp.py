"""Tensor parallel: two real processes over gloo give the tokens of one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engine.errors import ShardingError
from engine.models.families.table import model_config
from engine.models.sharding import shard_of
from engine.request import StepPlan
from engine.run.core import warm_up
from engine.run.tp import TpPeerError
from kv_transfer.layout import TensorSpec
from tests.engine import checkpoints, families
from tests.engine.driving import Driver, generate, random_prompt
from tests.engine.family_suite import Tenant, check_two_ranks
from tests.engine.tp_rank import CONFIG, replica


@pytest.mark.usefixtures("no_compiler")
def test_two_ranks_without_a_compiler_give_the_oracles_tokens(tmp_path: Path) -> None:
    check_two_ranks(Tenant.made("mistral", tmp_path))


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
