"""A step on a device: the host waits for nothing but the tokens, KV is written when it is said to
be, and the memory that was set aside is enough."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.random_model import SHAPES, random_model
from engine.api import KvMemory, LocalDeviceMemory
from engine.kernels.step_batch import pack
from engine.loop import EngineThread
from engine.request import (
    BlockPush,
    EngineEvent,
    HandoffId,
    PrefilledEvent,
    RequestId,
    RequestSpec,
    SamplingParams,
    TokenEvent,
)
from engine.run.build import lone_engine
from engine.run.kv_sizing import step_peak_bytes, with_sized_kv
from engine.run.layer_pushes import LayerPushes
from engine.run.torch_engine import TorchModel
from kv_transfer.layout import BlockId, KvLayout, LayerGroup, RegionLayout, TensorSpec
from tests.engine.gpu.models import GREEDY, config_on, engine_on, prompts_of

TINY = SHAPES["tiny"].hf_config()


@contextmanager
def waiting_is_an_error(device: torch.device) -> Iterator[None]:
    """On a GPU: whatever makes the host wait for the device raises."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3-windows"])
def test_from_a_plan_to_its_logits_the_host_never_waits(family: str, device: torch.device) -> None:
    from bench.random_model import random_model
    from engine.kernels.paged_kv import PagedKv
    from engine.request import ScheduledSeq
    from tests.engine.families import hf_config

    spec, decoder = random_model(hf_config(family), "float32", device)
    regions = RegionLayout(spec.layout, 0, 1, 64)
    kv = PagedKv(LocalDeviceMemory(regions, 1, str(device)), regions, device)
    table = np.arange(1, 40, dtype=np.int32)
    tables = tuple(table for _ in spec.layout.groups)
    seqs = [
        ScheduledSeq(RequestId(str(n)), np.zeros(count, np.uint32), start, tables, True)
        for n, (start, count) in enumerate([(5, 1), (100, 1), (40, 7), (90, 1), (0, 30)])
    ]
    with torch.inference_mode():
        for allowed in (False, True):  # the first run makes handles and workspaces
            with waiting_is_an_error(device) if allowed else torch.no_grad():
                batch = pack(seqs, spec.layout.block_size, device)
                hidden = decoder.forward(batch, kv, lambda layer: None)
                logits = decoder.logits(hidden[batch.sample_rows])
    assert logits is not None
    assert logits.isfinite().all()


class CopyingSink:
    """Copies each block when it hears that a layer of it is written."""

    def __init__(self) -> None:
        self.memory: KvMemory | None = None
        self.regions: RegionLayout | None = None
        self.copies: list[tuple[slice, torch.Tensor]] = []

    def message(self, payload: bytes) -> None:
        pass

    def layer_done(self, layer: int, pushes: Sequence[BlockPush]) -> None:
        for push in pushes:
            for block in push.block_ids:
                for tensor in ("k", "v"):
                    where = self._bytes(layer, tensor, block)
                    self.copies.append((where, self._read(where)))

    def step_done(self) -> None:
        pass

    def _bytes(self, layer: int, tensor: str, block: int) -> slice:
        assert self.regions is not None
        assert self.memory is not None
        group = self.regions.layout.groups[self.regions.layout.group_of_layer(layer)]
        spec = next(each for each in group.tensors if each.name == tensor)
        size = self.regions.tensor_block_bytes(spec)
        region, inner = divmod(block, self.regions.num_blocks)
        start = region * self.memory.region_stride_bytes
        start += self.regions.tensor_offset(layer, tensor) + inner * size
        return slice(start, start + size)

    def _read(self, where: slice) -> torch.Tensor:
        assert self.memory is not None
        part: torch.Tensor = self.memory.buffer[where]
        if part.device.type != "cuda":
            return part.clone()
        with torch.cuda.stream(torch.cuda.Stream()):  # behind nothing that the step asked for
            return part.cpu()


@pytest.mark.gpu
def test_a_layer_is_written_when_the_sink_hears_of_it(device: torch.device) -> None:
    spec, decoder = random_model(TINY, "bfloat16", device)
    config = config_on(device, "bfloat16", max_num_batched_tokens=512, num_blocks=64)
    sink, layout = CopyingSink(), spec.region_layout(config, 0, 1)
    memory = LocalDeviceMemory(layout, config.num_regions, str(device))
    memory.buffer.fill_(0xFF)  # NaN
    sink.memory, sink.regions = memory, layout
    engine = TorchModel(spec, config, decoder).make_engine(memory, sink)
    prompt = np.arange(500, dtype=np.uint32)
    request = RequestSpec(RequestId("p"), prompt, len(prompt), GREEDY)
    engine.add_prefill(request, HandoffId("h"), 0)
    events: list[EngineEvent] = []
    while not any(isinstance(event, PrefilledEvent) for event in events):
        events += engine.step()
    num_blocks = -(-len(prompt) // config.block_size)
    assert len(sink.copies) == num_blocks * SHAPES["tiny"].num_hidden_layers * 2
    for where, copy in sink.copies:
        assert torch.equal(copy, memory.buffer[where].cpu())
        assert not (copy == 0xFF).all()
    engine.release(RequestId("p"))
    engine.check_integrity()
    engine.close()


@pytest.mark.gpu
def test_the_host_runs_ahead_of_a_layer_that_is_being_written(device: torch.device) -> None:
    num_layers, size = 3, 8192 if device.type == "cuda" else 8
    tensors = (TensorSpec("k", 1, 8, "float32"),)
    layout = KvLayout(16, (LayerGroup(0, num_layers, tensors),))
    kv, large = torch.zeros(num_layers, device=device), torch.ones(size, size, device=device)
    written: list[float] = []

    class Reader(CopyingSink):
        def layer_done(self, layer: int, pushes: Sequence[BlockPush]) -> None:
            if device.type == "cuda":  # as a put: not behind the step's work
                with torch.cuda.stream(torch.cuda.Stream()):
                    written.append(kv[layer].cpu().item())
            else:
                written.append(kv[layer].item())

    pushes = LayerPushes.on(device, Reader(), layout)
    layer_done = pushes.of_step([BlockPush(HandoffId("h"), 0, (0,), (BlockId(1),))])
    for layer in range(num_layers):
        for _ in range(8):
            torch.mm(large, large)
        kv[layer].fill_(1)
        layer_done(layer)
    still_computes = device.type == "cuda" and not torch.cuda.current_stream().query()
    pushes.finish(is_read_back=True)
    pushes.close()
    assert still_computes == (device.type == "cuda")
    assert written == [1] * num_layers


@pytest.mark.gpu
def test_an_engine_steps_on_a_thread_of_its_own(device: torch.device) -> None:
    engine, over, tokens = engine_on(device, "llama", config_on(device)), threading.Event(), []

    def on_events(events: list[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, TokenEvent):
                tokens.append(event.token.token_id)
                if event.finished is not None:
                    over.set()

    thread = EngineThread(engine, on_events)
    thread.start()
    (prompt,) = prompts_of([60])
    request = RequestSpec(RequestId("r"), prompt, len(prompt), GREEDY)
    thread.call(lambda engine: engine.add(request)).result(30)
    assert over.wait(60)
    thread.stop()
    assert len(tokens) == GREEDY.max_tokens


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_kv_fills_what_the_utilization_leaves_and_the_largest_step_fits_beside_it(
    device: torch.device,
) -> None:
    on_gpu = device.type == "cuda"
    shape = SHAPES["0.1B" if on_gpu else "tiny"]
    spec, decoder = random_model(shape.hf_config(), "bfloat16", device)
    config = config_on(
        *(device, "bfloat16"), num_blocks=None, max_num_seqs=64, max_num_batched_tokens=512
    )
    config = replace(config, gpu_memory_utilization=0.3)
    step_bytes = step_peak_bytes(config, spec, decoder, device, (0, 1))
    if not on_gpu:  # the dry run itself works; there is nothing to measure
        assert step_bytes == 0
        assert with_sized_kv(config, spec, decoder, None) == config
        return
    total = torch.cuda.mem_get_info()[1]
    weights = torch.cuda.memory_allocated()
    sized = with_sized_kv(config, spec, decoder, None).kv_memory_bytes
    assert sized is not None
    assert total // 10 < sized < 0.3 * total - weights - step_bytes // 2
    torch.cuda.reset_peak_memory_stats()
    engine = lone_engine(TorchModel.sized(spec, config, decoder))
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, top_p=0.9, logprobs=3)
    for number in range(64):
        prompt = np.zeros(4000, np.uint32)  # shared by all: more is gathered than lies in the pool
        engine.add(RequestSpec(RequestId(str(number)), prompt, len(prompt), sampling))
    while engine.has_work():
        engine.step()
    assert torch.cuda.max_memory_allocated() <= 0.3 * total


@pytest.mark.gpu
def test_too_little_memory_is_refused_with_how_much_is_missing(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("a CPU: its KV memory is not sized by what is free")
    spec, decoder = random_model(TINY, "bfloat16", device)
    config = replace(config_on(device, num_blocks=None), gpu_memory_utilization=1e-6)
    with pytest.raises(ValueError, match=r"the GPU lacks \d+\.\d\d GiB for 4 blocks of KV"):
        with_sized_kv(config, spec, decoder, None)
