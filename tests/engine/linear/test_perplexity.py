"""8-bit weights leave the demo model's perplexity on text that it was not trained on as it was."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.config.engine import EngineConfig
from engine.api import LocalDeviceMemory
from engine.kernels.paged_kv import PagedKv
from engine.kernels.step_batch import pack
from engine.models.decoder import Decoder
from engine.request import RequestId, ScheduledSeq
from engine.run.build import load_model_spec
from engine.run.torch_runner import load_torch_decoder
from kv_transfer.layout import RegionLayout
from tests.models.training_scripts import run

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
MOST = 5e-3  # of a perplexity, relative
ROWS = """
import json, sys
from corpus import pack
from documents import short_document
from tokenizers import Tokenizer
from train import VALIDATION_SEED

rows = pack(Tokenizer.from_file(sys.argv[1]), short_document, VALIDATION_SEED, 24, 512)
print(json.dumps([rows.ids.tolist(), rows.counted.tolist()]))
"""


@pytest.fixture(scope="module")
def held_out() -> list[tuple[list[int], list[bool]]]:
    """Token ids, and which of them are to be predicted."""
    ids, counted = json.loads(run(ROWS, str(DEMO / "tokenizer.json")))
    return list(zip(ids, counted))


def perplexity(rows: list[tuple[list[int], list[bool]]], **settings: Any) -> float:
    config = EngineConfig(num_threads=1, device="cpu", **settings)
    spec = load_model_spec(str(DEMO), config)
    decoder = load_torch_decoder(str(DEMO), config, spec, None)
    total, count = 0.0, 0
    for ids, counted in rows:
        logprobs = logits_of(decoder, spec, ids[:-1]).log_softmax(-1)
        wanted = torch.tensor(counted[1:])
        found = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[wanted]
        total, count = total - float(found.double().sum()), count + len(found)
    assert count > 5_000
    return math.exp(total / count)


@torch.inference_mode()
def logits_of(decoder: Decoder, spec: Any, ids: list[int]) -> torch.Tensor:
    """[n, vocabulary], of all tokens in one step."""
    size = spec.layout.block_size
    regions = RegionLayout(spec.layout, 0, 1, -(-len(ids) // size) + 1)
    kv = PagedKv(LocalDeviceMemory(regions, 1, "cpu"), regions, decoder.device)
    table = np.arange(1, regions.num_blocks, dtype=np.int32)
    seq = ScheduledSeq(RequestId("row"), np.array(ids, np.uint32), 0, (table,), True)
    hidden = decoder.forward(pack([seq], size, decoder.device), kv, None)
    logits = decoder.logits(hidden)
    assert logits is not None
    return logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_perplexity_stays(held_out: list[tuple[list[int], list[bool]]], dtype: str) -> None:
    before = perplexity(held_out, dtype=dtype)
    after = perplexity(held_out, dtype=dtype, quantization="int8")
    print(f"perplexity {before:.4f}, with int8 {after:.4f}")
    assert 1 < before < 10
    assert after != before
    assert abs(after / before - 1) < MOST
