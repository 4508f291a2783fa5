"""One worker in a pod of its own, without Ray, on which a stream runs."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fleet_processes import Fleet, started

CONFIG = """
model: fake
runs_on: pods
pools:
  decode: {role: decode}
router: {placement: {local_prefill: always}}
engine:
  backend: fake
  block_size: 8
  num_blocks: 768
  num_regions: 2
  max_num_seqs: 16
  max_num_batched_tokens: 64
  fake: {window: 20, vocab_size: 50000, prefill_token_s: 0.0005, decode_step_s: 0.003}
"""


@dataclass
class OnePod:
    """A decode worker in a pod that a stream of so many tokens runs on."""

    fleet: Fleet
    link: Any
    spec: Any

    async def drain(self, timeout_s: float) -> tuple[int | None, str]:
        """Its status, and what it says."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cluster.node.pod_drain", f"--timeout={timeout_s}",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await asyncio.wait_for(process.communicate(), timeout_s + 30)
        return process.returncode, said.decode()


@contextlib.asynccontextmanager
async def streaming(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kit: Any, num_tokens: int
) -> AsyncIterator[OnePod]:
    monkeypatch.setenv("TMPDIR", str(folder))
    for name, value in {"NAME": "pod-a", "IP": "127.0.0.9"}.items():
        monkeypatch.setenv(f"POD_{name}", value)
    monkeypatch.setenv("NODE_NAME", "node-a")
    (config := folder / "cluster.yaml").write_text(CONFIG)
    async with started(config) as fleet:
        link = await kit.decode_link(fleet.address("decode-0"), "router-a").open()
        spec = kit.make_spec("last", 60)
        spec.sampling.max_tokens = num_tokens
        await link.reserve(spec)
        await link.until(lambda: link.of("last").tokens)
        yield OnePod(fleet, link, spec)
        await link.close()
