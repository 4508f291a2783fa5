"""`device: auto`, the KV memory of a GPU and a step on it, shown without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.config.engine import EngineConfig
from bench.random_model import SHAPES, random_model
from engine.api import LocalDeviceMemory
from engine.kernels.paged_kv import PagedKv
from engine.kernels.step_batch import pack
from engine.kernels.torch.torch_kernels import TorchKernels
from engine.models.checkpoint.folder import read_config
from engine.models.checkpoint.weights import Checkpoint
from engine.models.decoder import Decoder
from engine.models.loading import WeightLoader
from engine.models.sharding import shard_of
from engine.request import RequestId, ScheduledSeq
from engine.run import kv_sizing
from engine.run.auto_choice import choose_device, device_of, main, why_no_gpu
from engine.run.build import load_model_spec
from engine.run.kv_sizing import with_sized_kv
from tests.engine import checkpoints, families

GIB = 1 << 30
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU"
    " driver by downloading and installing a new version"
)


def gpu(monkeypatch: pytest.MonkeyPatch, *, is_there: bool) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_auto_is_a_gpu_where_torch_can_use_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu(monkeypatch, is_there=True)
    assert why_no_gpu() is None
    assert device_of(EngineConfig()) == torch.device("cuda")
    assert device_of(EngineConfig(device="cpu")) == torch.device("cpu")
    main()
    assert json.loads(capsys.readouterr().out) == {
        "device": "cuda",
        "device_reason": "NVIDIA H200",
    }


def test_pools_that_need_more_gpus_than_there_are_compute_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu(monkeypatch, is_there=True)
    main("--gpus", "2")
    chosen = json.loads(capsys.readouterr().out)
    assert chosen["device"] == "cpu"
    assert chosen["device_reason"].startswith("the pools need 2 GPUs, this machine has 1; make")


@pytest.mark.parametrize(
    ("cuda", "error", "reason"),
    [
        (None, None, "is built without CUDA"),
        ("13.0", RuntimeError(TOO_OLD), "the NVIDIA driver .* too old (found version 11040)"),
        ("13.0", RuntimeError("No CUDA GPUs are available"), "No CUDA GPUs are available"),
    ],
)
def test_where_it_can_use_none_the_reason_is_named(
    cuda: str | None, error: Exception | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        assert error is not None
        raise error

    gpu(monkeypatch, is_there=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert choose_device().device == "cpu"
    said = choose_device().reason
    assert all(part in said for part in reason.replace("the NVIDIA", "NVIDIA").split(" .* ")), said


class Ranks:
    """A group of two, of which the other one has less room."""

    rank, size = 0, 2

    def __init__(self, others: int) -> None:
        self._others = others

    def gather(self, value: int) -> list[int]:
        return [value, self._others]


def sized(monkeypatch: pytest.MonkeyPatch, tp: Any = None, **settings: Any) -> EngineConfig:
    """On a GPU of 10 GiB, 7 of them free, with 2 GiB of weights and a step of 1.5 GiB."""
    gpu(monkeypatch, is_there=True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7 * GIB, 10 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2 * GIB)
    monkeypatch.setattr(kv_sizing, "step_peak_bytes", lambda *args: 3 * GIB // 2)
    spec, decoder = random_model(SHAPES["tiny"].hf_config(), "bfloat16", torch.device("cpu"))
    return with_sized_kv(EngineConfig(**settings), spec, decoder, tp)


def test_kv_gets_what_weights_and_the_largest_step_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    half = sized(monkeypatch, gpu_memory_utilization=0.5).kv_memory_bytes
    assert half == 5 * GIB - 2 * GIB - 3 * GIB // 2
    assert sized(monkeypatch).kv_memory_bytes == 7 * GIB - 3 * GIB // 2  # what is free bounds it
    assert sized(monkeypatch, Ranks(GIB)).kv_memory_bytes == GIB


@pytest.mark.parametrize("given", [{"kv_memory_bytes": 1 << 20}, {"num_blocks": 64}])
def test_what_is_given_stays(given: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert sized(monkeypatch, **given) == EngineConfig(**given)


def test_too_little_memory_is_refused_with_how_much_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=r"lacks 0\.50 GiB .*weights take 2\.00, .* step 1\.50"):
        sized(monkeypatch, gpu_memory_utilization=0.3)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (
            {"kv_memory_bytes": 8 * GIB},
            r"engine\.kv_memory_bytes asks for 8\.00 GiB .* GPU has 7\.00",
        ),
        ({"num_blocks": 1 << 30}, r"engine\.num_blocks asks for .* GPU has 7\.00 GiB free"),
        ({"kv_memory_bytes": 1 << 50, "device": "cpu"}, r"asks for 10485\d\d\.\d\d .* machine has"),
    ],
)
def test_more_kv_than_there_is_memory_is_refused(
    asked: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=named):
        sized(monkeypatch, **asked)


def test_a_cpu_has_256_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, decoder = random_model(SHAPES["tiny"].hf_config(), "bfloat16", torch.device("cpu"))
    config = with_sized_kv(EngineConfig(device="cpu"), spec, decoder, None)
    layout = spec.region_layout(config, 0, 1)
    assert layout.num_blocks * config.num_regions * spec.block_bytes(1) == 256 << 20


@pytest.mark.parametrize("fraction", [0.0, 1.1])
def test_a_utilization_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"gpu_memory_utilization must be above 0"):
        EngineConfig(gpu_memory_utilization=fraction)


# --- a model on an accelerator, without one: tensors with a device, a dtype and no content -------
#
# An operation that mixes it with the host, or whose result the host would wait for, raises here.

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
    regions = spec.region_layout(config, 0, 1)
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
