"""A model on an accelerator, without one: tensors that have a device, a dtype and no content.

An operation that mixes it with the host, or whose result the host would wait for, raises here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from baton.config.engine import EngineConfig
from engine.api import LocalDeviceMemory
from engine.attention.paged_kv import PagedKv
from engine.attention.torch_kernels import TorchKernels
from engine.build import load_model_spec, region_layout
from engine.models.decoder import Decoder
from engine.models.folder import read_config
from engine.models.loading import WeightLoader
from engine.models.sharding import shard_of
from engine.request import RequestId, ScheduledSeq
from engine.step_batch import pack
from engine.weights import Checkpoint
from tests.engine import checkpoints, families

DEVICE = torch.device("meta")


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3-windows", "mixtral", "qwen3-moe"]
)
def test_a_step_stays_on_its_device_and_never_makes_the_host_wait(
    family: str, tmp_path: Path
) -> None:
    checkpoints.save(family, tmp_path)
    config = EngineConfig(num_blocks=64, dtype="bfloat16")
    spec = load_model_spec(str(tmp_path), config)
    model = read_config(tmp_path)
    shard = shard_of(model, 0, 1)
    with Checkpoint(tmp_path) as checkpoint:
        loader = WeightLoader(checkpoint, model, shard, torch.bfloat16, DEVICE)
        weights = loader.load()
    table = np.arange(1, 9, dtype=np.int32)
    tables = tuple(table for _ in spec.layout.groups)
    seqs = [
        ScheduledSeq(RequestId(str(n)), np.zeros(count, np.uint32), start, tables, True)
        for n, (start, count) in enumerate([(5, 1), (100, 1), (40, 7), (90, 1), (0, 30)])
    ]
    regions = region_layout(spec, config, 0, 1)
    decoder = Decoder(model, weights, shard, TorchKernels(), None)
    memory = LocalDeviceMemory(regions, config.num_regions, str(DEVICE))
    kv = PagedKv(memory, regions, DEVICE)
    batch = pack(seqs, config.block_size, DEVICE)
    with torch.inference_mode():
        hidden = decoder.forward(batch, kv, lambda layer: None)
        logits = decoder.logits(hidden[batch.sample_rows])
    assert (hidden.device, hidden.dtype) == (DEVICE, torch.bfloat16)
    assert logits is not None
    assert (logits.device, logits.dtype) == (DEVICE, torch.float32)
    assert logits.shape == (len(seqs), families.VOCAB)
