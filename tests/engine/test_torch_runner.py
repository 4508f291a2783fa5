"""A runner's dealings with its sink and its pool."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from baton.config.engine import EngineConfig
from engine.request import BlockPush, HandoffId, RequestId, ScheduledSeq, StepPlan
from engine.run.build import load_model_spec
from kv_transfer.layout import BlockId
from tests.engine import checkpoints, families
from tests.engine.driving import Setup, random_prompt, set_up

CONFIG = EngineConfig(dtype="float32", num_blocks=64, num_threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    path = tmp_path_factory.mktemp("qwen2")
    checkpoints.save("qwen2", path)  # layer 0 sees all, layers 1 and 2 a window
    return path


@pytest.fixture
def setup(folder: Path) -> Setup:
    return set_up(folder, CONFIG)


def push(group: int, block: int) -> BlockPush:
    return BlockPush(HandoffId("h"), group, (0,), (BlockId(block),))


def sequence(tokens: int, blocks: list[int], samples: bool = True) -> ScheduledSeq:
    table = np.array(blocks, dtype=np.int32)
    ids = np.arange(tokens, dtype=np.uint32)
    return ScheduledSeq(RequestId("r"), ids, 0, (table, table), samples)


def test_sink_hears_messages_then_each_layer_with_its_groups_pushes_then_the_end(
    setup: Setup,
) -> None:
    pushes = (push(0, 3), push(1, 3), push(1, 5))
    plan = StepPlan(7, (sequence(20, [3, 5]),), pushes, (b"open", b"more"))
    assert len(setup.runner.run(plan, {})) == 1
    assert setup.sink.calls == [
        ("message", b"open"),
        ("message", b"more"),
        ("layer_done", 0, pushes[:1]),
        ("layer_done", 1, pushes[1:]),
        ("layer_done", 2, pushes[1:]),
        ("step_done",),
    ]


def test_a_layers_kv_is_written_when_the_sink_hears_of_it(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def layer_done(layer: int, pushes: object) -> None:
        keys, values = (getattr(setup.runner._kv.layers[layer], n) for n in ("keys", "values"))
        written.append(bool(keys[0, 3].isfinite().all() and values[0, 3].isfinite().all()))

    monkeypatch.setattr(setup.sink, "layer_done", layer_done)
    setup.runner.run(StepPlan(1, (sequence(16, [3]),), (push(0, 3),)), {})
    assert written == [True, True, True]


def test_a_step_without_pushes_or_sequences_only_ends(setup: Setup) -> None:
    assert setup.runner.run(StepPlan(1, (sequence(4, [1], samples=False),)), {}) == []
    assert setup.runner.run(StepPlan(2, (), sink_messages=(b"m",)), {}) == []
    assert setup.sink.calls == [("step_done",), ("message", b"m"), ("step_done",)]


def test_kv_lies_where_the_region_layout_says(setup: Setup) -> None:
    block = setup.regions.num_blocks + 1  # the second of region 1
    setup.runner.run(StepPlan(1, (sequence(16, [block]),)), {})
    spec = setup.spec.layout.groups[1].tensors[1]
    size = setup.regions.tensor_block_bytes(spec)
    start = setup.memory.region_stride_bytes + setup.regions.tensor_offset(2, "v") + size
    found = setup.memory.buffer[start : start + size].view(np.float32)
    expected = setup.runner._kv.layers[2].values[1, 1].numpy().ravel()
    assert np.isfinite(found).all()
    assert np.array_equal(found, expected)


def test_blocks_per_region_follow_from_memory_or_count(folder: Path) -> None:
    spec = load_model_spec(str(folder), CONFIG)
    assert spec.region_layout(CONFIG, 0, 1).num_blocks == 16
    for size in (1, 2, 4):
        config = EngineConfig(dtype="float32", kv_memory_bytes=1 << 20, num_regions=3)
        layouts = [spec.region_layout(config, rank, size) for rank in range(size)]
        assert len({layout.num_blocks for layout in layouts}) == 1
        for layout in layouts:
            per_block = layout.num_bytes() // layout.num_blocks
            assert 0 <= (1 << 20) - 3 * layout.num_bytes() < 3 * per_block
    with pytest.raises(ValueError, match="kv_memory_bytes=100"):
        spec.region_layout(EngineConfig(kv_memory_bytes=100), 0, 1)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_bf16_logits_are_as_near_to_fp32_as_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    exact = checkpoints.save(family, tmp_path)
    prompt = random_prompt(40, families.VOCAB, 3)
    rounded = copy.deepcopy(exact).bfloat16()
    with torch.inference_mode():
        expected, theirs = (m(torch.tensor([prompt])).logits[0].float() for m in (exact, rounded))
    setup = set_up(tmp_path, EngineConfig(dtype="bfloat16", num_blocks=64, num_threads=1))
    table = np.arange(1, 4, dtype=np.int32)
    tables = (table,) * len(setup.spec.layout.groups)
    ours = []
    for position, token in enumerate(prompt):  # one token a step, so that each gives its logits
        ids = np.array([token], dtype=np.uint32)
        seq = ScheduledSeq(RequestId("r"), ids, position, tables, True)
        logits = setup.runner.run_step(StepPlan(position, (seq,)))
        assert logits is not None
        ours.append(logits)
    # Peaky attention and choices of experts magnify rounding now and then: the median position.
    error, their_error = (
        (found - expected).norm(dim=-1).median() for found in (torch.cat(ours), theirs)
    )
    assert error < 1.5 * their_error
