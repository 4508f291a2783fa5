"""An engine's first steps, which cost what no later one does, before anybody waits for them.

Threads, kernels, plans of matrix products and memory that was never touched: the first steps make
all of it, on every rank.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import numpy as np

from baton.config.engine import EngineConfig
from engine.api import KvSink, Runner
from engine.core import EngineCore
from engine.request import RequestId, RequestSpec, SamplingParams

log = logging.getLogger(__name__)

_CHUNK = 64
_MAX_LEN = 132  # two chunks, of which the second looks back at the first, and a few decodes
_NUM_OUTPUT_TOKENS = 4


def warm_up(config: EngineConfig, runner: Runner, sink: KvSink) -> None:
    """Run one short request, of nobody's, through prefill and decode. Raises what a step raises.

    On the thread that will step: some of it is a thread's own. The request has a scheduler, blocks
    and rates of its own, over KV memory of which nobody may hold a block yet; so the engine that
    serves has no trace of it.
    """
    started_at = time.monotonic()
    budget = min(_CHUNK, config.max_num_batched_tokens)
    alone = replace(config, prefix_cache=False, max_num_seqs=1, max_num_batched_tokens=budget)
    core = EngineCore(alone, runner, sink)
    max_len = min(_MAX_LEN, core.capacity.max_model_len)
    num_prompt_tokens = max(1, max_len - _NUM_OUTPUT_TOKENS)
    prompt = np.arange(num_prompt_tokens, dtype=np.uint32) % core.model.vocab_size
    sampling = SamplingParams(max_tokens=max_len - num_prompt_tokens, ignore_eos=True)
    core.add(RequestSpec(RequestId("warm-up"), prompt, num_prompt_tokens, sampling))
    while core.has_work():
        core.step()
    log.info("warmed up in %.2f s", time.monotonic() - started_at)
