"""One engine in a process of its own, for `bench.engine`. It takes commands as JSON lines.

python bench/engine_sides.py SIDE FOLDER DTYPE NUM_THREADS

A peer runs in a virtual environment without Baton, so this file imports none of it at the top.
Commands: {"prefill": length, "seed": s} computes one prompt and its first token; {"decode": batch}
computes a batch's prompts; {"steps": n} takes n steps of it. Answers: [seconds, tokens]. Steps that
follow each other see a context that grows, on all sides alike.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

CONTEXT = 256
LARGEST_TOKEN_ID = 30000
LONGEST_PROMPT = 2048
LARGEST_BATCH = 32
MOST_NEW_TOKENS = 256  # of a request in a batch, over all rounds
_KV_BYTES = 4 << 30


def random_prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, LARGEST_TOKEN_ID, length).tolist()  # type: ignore[no-any-return]


class Side(Protocol):
    def add(self, prompt: list[int], max_tokens: int) -> None:
        """Add a greedy request that goes on to `max_tokens`."""

    def step(self) -> int:
        """Take one step, and return the number of tokens that it gave."""

    def drop(self) -> None:
        """End all requests."""


class Baton:
    def __init__(
        self, folder: Path, dtype: str, num_threads: int, quantization: str = "none"
    ) -> None:
        config = importlib.import_module("baton.config.engine").EngineConfig(
            dtype=dtype,
            quantization=quantization,
            device="cpu",
            max_num_batched_tokens=LONGEST_PROMPT,
            max_num_seqs=LARGEST_BATCH,
            max_model_len=4096,
            max_itl_factor=None,  # as the peers: prompts of a batch do not wait for its decodes
            kv_memory_bytes=_KV_BYTES // 2,
            num_regions=1,
            prefix_cache=False,
            num_threads=num_threads,
        )
        self._request = importlib.import_module("engine.request")
        build = importlib.import_module("engine.run.build")
        self._engine = build.load_lone_engine(str(folder), config)
        self._ids: list[Any] = []

    def add(self, prompt: list[int], max_tokens: int) -> None:
        request = self._request
        self._ids.append(request.RequestId(f"r{len(self._ids)}"))
        sampling = request.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        tokens = np.array(prompt, np.uint32)
        self._engine.add(request.RequestSpec(self._ids[-1], tokens, len(tokens), sampling))

    def step(self) -> int:
        kind = self._request.TokenEvent
        return sum(isinstance(event, kind) for event in self._engine.step())

    def drop(self) -> None:
        for request_id in self._ids:
            self._engine.abort(request_id)
        while self._engine.has_work():
            self._engine.step()


class Vllm:
    """vLLM's offline engine in this process: no server, no second process."""

    def __init__(self, folder: Path, dtype: str, num_threads: int, *, eager: bool) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_BYTES >> 30),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self._vllm = importlib.import_module("vllm")
        engine = self._vllm.LLM(
            model=str(folder),
            dtype=dtype,
            kv_cache_dtype="auto",  # the model's
            enforce_eager=eager,
            max_model_len=4096,
            max_num_seqs=LARGEST_BATCH,
            max_num_batched_tokens=LONGEST_PROMPT,
            enable_prefix_caching=False,
            async_scheduling=False,
        )
        self._engine = engine.llm_engine
        self._count = 0
        self._lengths: dict[str, int] = {}

    def add(self, prompt: list[int], max_tokens: int) -> None:
        self._count += 1
        sampling = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, sampling)

    def step(self) -> int:
        new = 0
        for output in self._engine.step():
            length = len(output.outputs[0].token_ids)
            new += length - self._lengths.get(output.request_id, 0)
            self._lengths[output.request_id] = length
        return new

    def drop(self) -> None:
        self._engine.abort_request([str(i + 1) for i in range(self._count)])
        while self._engine.has_unfinished_requests():
            self._engine.step()


class Openvino:
    """GenAI's continuous batching. The folder is converted once, beside the checkpoint."""

    def __init__(self, folder: Path, dtype: str, num_threads: int) -> None:
        genai = importlib.import_module("openvino_genai")
        self._tensor = importlib.import_module("openvino").Tensor
        self._genai = genai
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = LONGEST_PROMPT
        scheduler.max_num_seqs = LARGEST_BATCH
        scheduler.cache_size = _KV_BYTES >> 30
        scheduler.enable_prefix_caching = False
        precision = {"bfloat16": "bf16", "float32": "f32"}[dtype]
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": num_threads,
        }
        self._pipeline = genai.ContinuousBatchingPipeline(
            self.converted(folder, dtype), scheduler, "CPU", properties
        )
        self._count = 0
        self._handles: list[Any] = []

    @staticmethod
    def converted(folder: Path, dtype: str) -> Path:
        to = folder.parent / f"{folder.name}-openvino"
        if not (to / "openvino_tokenizer.xml").exists():
            export = importlib.import_module("optimum.exporters.openvino").main_export
            export(str(folder), to, task="text-generation-with-past", ov_config=None)
        return to

    def add(self, prompt: list[int], max_tokens: int) -> None:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        self._count += 1
        ids = self._tensor(np.array([prompt], np.int64))
        self._handles.append(self._pipeline.add_request(self._count, ids, config))

    def step(self) -> int:
        self._pipeline.step()
        new = 0
        for handle in self._handles:
            while handle.can_read():
                new += sum(len(output.generated_ids) for output in handle.read().values())
        return new

    def drop(self) -> None:
        for handle in self._handles:
            handle.cancel() if hasattr(handle, "cancel") else handle.drop()
        self._handles.clear()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


class Transformers:
    """One batch of equal lengths at a time: it has no scheduler."""

    def __init__(self, folder: Path, dtype: str, num_threads: int) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(num_threads)
        models = importlib.import_module("transformers").AutoModelForCausalLM
        self._model = models.from_pretrained(folder, dtype=getattr(self._torch, dtype))
        self._model.train(False)
        self._prompts: list[list[int]] = []
        self._out: Any = None
        self._token: Any = None

    def add(self, prompt: list[int], max_tokens: int) -> None:
        self._prompts.append(prompt)

    def step(self) -> int:
        torch = self._torch
        with torch.inference_mode():
            if self._out is None:
                tokens, cache = torch.tensor(self._prompts), None
            else:
                tokens, cache = self._token, self._out.past_key_values
            self._out = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            self._token = self._out.logits[:, -1].argmax(-1, keepdim=True)
            self._token.tolist()
        return len(self._prompts)

    def drop(self) -> None:
        self._prompts, self._out = [], None


def without(technique: str) -> None:
    """Take one of Baton's techniques away, in this process."""
    if technique == "fused layers":
        fused = importlib.import_module("engine.models.fused_layers").FusedLayers
        fused.of = classmethod(lambda *_: None)
    elif technique == "huge pages":
        importlib.import_module("mmap").__dict__.pop("MADV_HUGEPAGE")
    elif technique == "packed weights":  # nor fused layers
        linear: Any = importlib.import_module("engine.models.linear.packed")
        linear.can_pack = lambda *_, **__: False
    elif technique in ("AMX", "AVX-512"):
        flags = {"AMX": ("-mno-amx-tile", "-mno-amx-bf16"), "AVX-512": ("-march=haswell",)}
        recipe = importlib.import_module("engine.kernels.native.recipe")
        kernels = importlib.import_module("dataclasses").replace(
            recipe.KERNELS, flags=(*recipe.KERNELS.flags, *flags[technique])
        )
        native: Any = importlib.import_module("engine.kernels.native.native_kernels")
        native.KERNELS = kernels
    elif technique == "bf16 weights":  # of float32 activations
        packed = importlib.import_module("engine.kernels.native.packed_weights").PackedWeight
        plain = packed.__init__

        def wide(self: Any, parts: Any, bias: Any, dtype: Any, gate: Any) -> None:
            plain(self, [part.to(dtype) for part in parts], bias, dtype, gate)

        packed.__init__ = wide
    else:
        raise ValueError(technique)


SIDES: dict[str, Callable[[Path, str, int], Side]] = {
    "baton": Baton,
    "baton int8": lambda folder, dtype, threads: Baton(folder, dtype, threads, "int8"),
    "vllm": lambda *given: Vllm(*given, eager=True),
    "vllm compiled": lambda *given: Vllm(*given, eager=False),
    "openvino": Openvino,
    "transformers": Transformers,
}


def serve(side: Side) -> None:
    running = 0
    for line in iter(sys.stdin.readline, ""):
        command = json.loads(line)
        tokens, start = 0, time.perf_counter()
        if "prefill" in command:
            side.add(random_prompt(command["prefill"], command["seed"]), 1)
            start = time.perf_counter()
            while tokens < 1:
                tokens += side.step()
            seconds = time.perf_counter() - start
            side.drop()
        elif "decode" in command:
            running = command["decode"]
            for seed in range(running):
                side.add(random_prompt(CONTEXT, seed), MOST_NEW_TOKENS)
            while tokens < running:  # in one step: every prompt is computed
                tokens = side.step()
            seconds = time.perf_counter() - start
        elif "steps" in command:
            for _ in range(command["steps"]):
                tokens += side.step()
            seconds = time.perf_counter() - start
        else:
            side.drop()
            seconds = time.perf_counter() - start
        print(json.dumps([seconds, tokens]), file=ANSWERS, flush=True)


if __name__ == "__main__":
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is no answer
    name, folder, dtype, num_threads = sys.argv[1:]
    began = time.perf_counter()
    kind, _, technique = name.partition(" without ")
    if technique:
        without(technique)
    made = SIDES[kind](Path(folder), dtype, int(num_threads))
    print(json.dumps([time.perf_counter() - began, 0]), file=ANSWERS, flush=True)
    serve(made)
