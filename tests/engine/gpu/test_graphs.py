"""Decodes in CUDA graphs: what a graph is given, and that a step waits for nothing but tokens."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from bench.random_model import random_model
from engine.api import LocalDeviceMemory
from engine.kernels.native.native_kernels import pick_kernels
from engine.kernels.paged_kv import PagedKv
from engine.kernels.step_batch import pack
from engine.request import (
    RequestId,
    RequestSpec,
    SampledToken,
    SamplingParams,
    ScheduledSeq,
    TokenEvent,
)
from engine.run.core import EngineCore
from engine.run.cuda_graphs import DecodeGraphs, DecodeInputs, bucket_of
from kv_transfer.layout import RegionLayout
from tests.engine.families import hf_config
from tests.engine.gpu.models import answers, config_on, engine_on, prompts_of

CONTEXTS = (3, 40, 700, 16, 0)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    "top-p": SamplingParams(top_p=0.9, max_tokens=40, ignore_eos=True),
    "all filters": SamplingParams(
        *(0.8, 30, 0.9, 0.05), repetition_penalty=1.1, max_tokens=40, ignore_eos=True, logprobs=3
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3-windows"])
def test_padded_inputs_give_the_same_hidden_states_and_write_the_same_kv(
    family: str, device: torch.device
) -> None:
    kernels = pick_kernels(torch.device("cuda"), torch.float32)
    if kernels.name != "triton":
        pytest.skip("torch's kernels take no padded inputs")
    from engine.kernels.triton.triton_kernels import decode_cutting

    spec, decoder = random_model(hf_config(family), "float32", device, kernels=kernels)
    regions = RegionLayout(spec.layout, 0, 1, 60)
    blocks = iter(1 + np.random.default_rng(0).permutation(59).astype(np.int32))
    seqs = []
    for number, context in enumerate(CONTEXTS):
        table = np.array([next(blocks) for _ in range(context // 16 + 1)], np.int32)
        tables = tuple(table for _ in spec.layout.groups)
        token = np.array([number + 1], np.uint32)
        seqs.append(ScheduledSeq(RequestId(str(number)), token, context, tables, True))
    found = []
    for padded in (False, True):
        memory = LocalDeviceMemory(regions, 1, str(device))
        kv = PagedKv(memory, regions, device)
        generator = torch.Generator().manual_seed(1)
        for layer in kv.layers:
            for tensor in (layer.keys, layer.values):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        batch = pack(seqs, 16, device)
        if padded:
            cutting = decode_cutting(decoder.attention, kv.layers[0].keys)
            assert cutting is not None
            inputs = DecodeInputs(spec.layout, cutting, bucket_of(len(seqs)), 800, device)
            for step in (seqs[:1], seqs):  # nothing of the step before is left
                inputs.fill(step)
            batch = inputs.batch
        with torch.inference_mode():
            hidden = decoder.forward(batch, kv, lambda layer: None)[: len(seqs)]
        found.append((hidden, memory.buffer.view(torch.float32)))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other)


def decoding(device: torch.device, sampling: SamplingParams, contexts: list[int]) -> EngineCore:
    """An engine whose requests all decode, as a decode worker's do."""
    engine = engine_on(device, "qwen3", config_on(device))
    for number, context in enumerate(contexts):
        request, prompt = RequestId(str(number)), np.arange(context, dtype=np.uint32) % 300
        engine.reserve(RequestSpec(request, prompt, context, sampling))
        engine.step()  # its answer
        engine.admit(request, SampledToken(7))
    return engine


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_step_of_decodes_waits_for_its_tokens_alone(name: str, device: torch.device) -> None:
    if device.type != "cuda" or pick_kernels(device, torch.float32).name != "triton":
        pytest.skip("no GPU and Triton: nothing waits, or torch's kernels do")
    engine = decoding(device, SAMPLINGS[name], [5, 60, 200])
    for _ in range(3):
        engine.step()  # records
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            events = engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(isinstance(event, TokenEvent) for event in events) == 3
    assert len(waits) == 1, [str(each.message) for each in waits]


@pytest.mark.gpu
def test_sparse_mlps_in_a_graph_find_tokens_as_likely(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16, in which no expert makes the host wait on a recent GPU. The first token is the
    prompt's, the second one a graph's."""
    config, prompts = config_on(device, "bfloat16"), prompts_of([5, 40, 130])
    recorded = answers(engine_on(device, "qwen3-moe", config), prompts)
    monkeypatch.setattr(DecodeGraphs, "on", lambda *_: None)
    alone = answers(engine_on(device, "qwen3-moe", config), prompts)
    for one, other in zip(recorded, alone):
        assert one.ids[0] == other.ids[0]
        assert one.logprobs[1] == pytest.approx(other.logprobs[1], abs=0.3)


@pytest.mark.gpu
def test_buckets_hold_every_number_with_little_padding() -> None:
    for num_seqs in range(1, 513):
        bucket = bucket_of(num_seqs)
        assert num_seqs <= bucket < num_seqs + max(8, num_seqs / 4)
        assert bucket_of(bucket) == bucket
    assert len({bucket_of(num_seqs) for num_seqs in range(1, 257)}) == 19
