"""What every model family must do: a new one of `engine.models.families` passes these checks.

Each compares with transformers' model of the same tiny random checkpoint, or with the engine itself
where it computes the same thing another way. All raise AssertionError, or the engine's own error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from engine.errors import CheckpointError
from engine.kernels.step_batch import pack
from engine.models.checkpoint.folder import read_config
from engine.models.checkpoint.weights import Checkpoint
from engine.models.families.table import model_config
from engine.models.loading import WeightLoader
from engine.models.sharding import shard_of
from engine.request import RequestId, RequestSpec, SamplingParams, ScheduledSeq, TokenEvent
from engine.run.build import load_lone_engine, load_model_spec
from engine.run.core import EngineCore
from tests.engine import checkpoints, families
from tests.engine.driving import Driver, Setup, generate, random_prompt, set_up
from tests.engine.greedy import Greedy
from tests.engine.tp_rank import CONFIG, replica

LENGTH = 100  # of a prompt: longer than the tiny models' windows
TOLERANCE = 2e-3
"""Of a logit: rounding in float32 moves one of the tiny models' by up to 5e-4."""


@dataclass(frozen=True)
class Tenant:
    """A tiny checkpoint of one row of `families.FAMILIES`, and transformers' model of it."""

    name: str
    folder: Path
    oracle: transformers.PreTrainedModel

    @classmethod
    def made(cls, name: str, folder: Path) -> Tenant:
        return cls(name, folder, checkpoints.save(name, folder))


def check_config(tenant: Tenant) -> None:
    """A file that leaves out what it may reads like the one that transformers writes in full."""
    short = families.hf_config(tenant.name)
    assert model_config(short) == read_config(tenant.folder)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = ("num_attention_heads", "num_key_value_heads")
    least = {key: short[key] for key in ("architectures", *sizes, *heads)}
    full = type(tenant.oracle.config)(**least).to_json_string(use_diff=False)
    assert model_config(least) == model_config(json.loads(full))


def check_weights(tenant: Tenant) -> None:
    """Every tensor of the checkpoint is read, and each that is missing is missed by its name."""
    config = read_config(tenant.folder)

    def load(checkpoint: Checkpoint) -> None:
        shard = shard_of(config, 0, 1)
        WeightLoader(checkpoint, config, shard, torch.float32, torch.device("meta")).load()

    with Checkpoint(tenant.folder) as checkpoint:
        load(checkpoint)
        names = checkpoint.names()
    for name in names:
        with Checkpoint(tenant.folder) as checkpoint:
            del checkpoint._file_of[name]
            checkpoint._unread.discard(name)
            with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
                load(checkpoint)


def check_logits(tenant: Tenant) -> None:
    """Every logit of a prompt is that of transformers, and the whole prompt's are its chunks'."""
    prompt = random_prompt(LENGTH, families.VOCAB, 3)
    with torch.inference_mode():
        expected = tenant.oracle(torch.tensor([prompt])).logits[0].float()
    setup = set_up(tenant.folder, CONFIG)
    for chunks in ([LENGTH], [1, 15, 17, 50, 16, 1]):
        found = logits_of(setup, prompt, chunks)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@torch.inference_mode()
def logits_of(setup: Setup, prompt: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """float32 [len(prompt), vocab_size], of a prompt that is computed chunk after chunk."""
    decoder, kv = setup.runner._decoder, setup.runner._kv
    layout = setup.spec.layout
    table = np.arange(1, 1 - (-len(prompt) // layout.block_size), dtype=np.int32)
    found, start = [], 0
    for count in chunks:
        tokens = np.array(prompt[start : start + count], dtype=np.uint32)
        tables = (table,) * len(layout.groups)
        seq = ScheduledSeq(RequestId("r"), tokens, start, tables, True)
        batch = pack([seq], layout.block_size, decoder.device)
        logits = decoder.logits(decoder.forward(batch, kv, None))
        assert logits is not None
        found.append(logits)
        start += count
    return torch.cat(found)


def check_cache(tenant: Tenant) -> None:
    """A prompt whose beginning is cached gets the answer of transformers, as one that is not."""
    engine = load_lone_engine(str(tenant.folder), CONFIG)
    begun = random_prompt(LENGTH, families.VOCAB, 4)
    for number, (prompt, cached) in enumerate(((begun, 0), ([*begun, 5, 6], 96), (begun, 96))):
        answer, num_cached = answered(engine, str(number), prompt)
        assert num_cached == cached
        assert answer == checkpoints.greedy_answer(tenant.oracle, prompt, 8)


def answered(engine: EngineCore, name: str, prompt: Sequence[int]) -> tuple[Greedy, int]:
    """A greedy answer, and how many tokens of the prompt were cached."""
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    token_ids = np.asarray(prompt, np.uint32)
    engine.add(RequestSpec(RequestId(name), token_ids, len(token_ids), greedy))
    events: list[TokenEvent] = []
    while engine.has_work():
        events += [event for event in engine.step() if isinstance(event, TokenEvent)]
    return Greedy.of([event.token for event in events]), events[0].num_cached_tokens


def check_two_ranks(tenant: Tenant) -> None:
    """Two processes with half of the heads each give the answers of transformers, and have one's
    fingerprint."""
    prompts = [random_prompt(length, families.VOCAB, length) for length in (1, 40, 131)]
    with replica(tenant.folder, 2) as (setup, others):
        assert setup.spec == load_model_spec(str(tenant.folder), CONFIG)
        found = generate(Driver(setup), prompts, 8, chunk=64)
        assert found == [checkpoints.greedy_answer(tenant.oracle, p, 8) for p in prompts]
    assert [other.exitcode for other in others] == [0]


CHECKS = (check_config, check_weights, check_logits, check_cache, check_two_ranks)
