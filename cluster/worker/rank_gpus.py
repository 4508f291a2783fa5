"""Which GPU a rank has: one of its own, the only one that it sees.

Under Ray each rank's bundle holds a GPU, and Ray sets CUDA_VISIBLE_DEVICES. Without Ray rank 0 sets
it, from its own.
"""

from __future__ import annotations

from baton.config.engine import EngineConfig
from baton.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def needs_gpu(engine: EngineConfig) -> bool:
    return engine.device == "cuda" and engine.backend != "fake"


def rank_environments(
    engine: EngineConfig, num_ranks: int, visible: str | None
) -> list[dict[str, str]]:
    """What each rank of a replica has in its environment of its own, for ranks without Ray.

    `visible`: this process's CUDA_VISIBLE_DEVICES. Raises ConfigError when it names too few. A
    single rank takes the first as torch does.
    """
    if num_ranks == 1 or not needs_gpu(engine):
        return [{} for _ in range(num_ranks)]
    if visible is None:
        return [{VISIBLE: str(rank)} for rank in range(num_ranks)]
    gpus = [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    if len(gpus) < num_ranks:
        raise ConfigError(f"{num_ranks} ranks need a GPU each; {VISIBLE} is {visible!r}")
    return [{VISIBLE: gpu} for gpu in gpus[:num_ranks]]
