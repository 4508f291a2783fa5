"""Replicas of several ranks: those above 0 are processes of their own."""

from __future__ import annotations

import multiprocessing
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from baton.config.engine import EngineConfig
from engine.engines import RankPosition
from engine.run.tp import TpGroup, TpPeerError
from tests.engine.driving import Setup, set_up

CONFIG = EngineConfig(dtype="float32", num_blocks=200, num_threads=1)
LOST_PEER = 7  # exit status


def main(folder: str, address: str, rank: int, size: int, config: EngineConfig) -> None:
    """Follow rank 0 until the stop message; the exit status shows a lost peer."""
    torch.set_num_threads(1)
    tp = TpGroup.join(RankPosition(rank, size, address))
    try:
        set_up(Path(folder), config, tp).runner.follow()
    except TpPeerError:
        sys.exit(LOST_PEER)


@contextmanager
def replica(
    folder: Path, size: int, config: EngineConfig = CONFIG
) -> Iterator[tuple[Setup, list[BaseProcess]]]:
    """Rank 0 here, the others as processes; all have ended at exit."""
    torch.set_num_threads(1)
    listening = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listening.getsockname()[1]}"
    spawn = multiprocessing.get_context("spawn")
    others = [
        spawn.Process(target=main, args=(str(folder), address, rank, size, config))
        for rank in range(1, size)
    ]
    for other in others:
        other.start()
    try:
        position = RankPosition(0, size, address, listening.detach())
        setup = set_up(folder, config, TpGroup.join(position))
        try:
            yield setup, others
        finally:
            setup.runner.close()
    finally:
        for other in others:
            other.join(timeout=30)
            if other.is_alive():
                other.kill()
                other.join()
