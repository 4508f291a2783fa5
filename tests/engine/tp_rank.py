"""A rank > 0 as a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from baton.config.engine import EngineConfig
from engine.run.tp import TpGroup, TpPeerError, follow
from tests.engine.driving import set_up

LOST_PEER = 7  # exit status


def main(folder: str, address: str, rank: int, size: int, config: EngineConfig) -> None:
    """Follow rank 0 until the stop message; the exit status shows a lost peer."""
    torch.set_num_threads(1)
    tp = TpGroup.join(rank, size, address)
    try:
        follow(set_up(Path(folder), config, tp).runner)
    except TpPeerError:
        sys.exit(LOST_PEER)
