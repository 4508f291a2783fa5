"""`engine.dtype: auto` of a worker in a pod: nobody could decide before it was started, since the
workers' own pods alone have a folder of the model (see `cluster.pools.auto_settings`).

Each worker asks the registry before it loads the model, and proposes the dtype it would choose by
itself. The first proposal decides for all pools that leave the dtype open. Workers on unlike
devices could choose unlike dtypes, and would then never pair.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import cast

from baton.config.engine import AUTO, Dtype
from baton.control_client import ControlClient
from baton.errors import NotFoundError, UnavailableError
from cluster.worker.config import WorkerConfig

log = logging.getLogger(__name__)

_WITHIN_S = 60.0  # a supervisor that has just been started again is there long before
_AGAIN_S = 0.5


def with_agreed_dtype(config: WorkerConfig, model: str) -> WorkerConfig:
    """With a dtype, where that is still open. `model`: its folder. Blocks.

    Raises ModelError, and UnavailableError where the registry says nothing.
    """
    engine = config.engine
    if not config.in_pod or engine.backend != "torch" or engine.dtype != AUTO:
        return config
    from engine.device import device_of  # torch, which a fake worker does without
    from engine.dtype import choose_dtype

    own = choose_dtype(model, [device_of(engine).type])
    dtype, reason = _agreed(config, own.dtype), own.reason
    if dtype != own.dtype:
        reason = f"agreed with the other workers; {own.dtype} by itself"
    log.info("%s computes in %s: %s", config.pool, dtype, reason)
    return dataclasses.replace(config, engine=dataclasses.replace(engine, dtype=cast(Dtype, dtype)))


def _agreed(config: WorkerConfig, own: str) -> str:
    give_up_at = time.monotonic() + _WITHIN_S
    with ControlClient(config.control_address) as control:
        while True:
            try:
                return control.agree_dtype(config.pool, own)
            except (
                NotFoundError,
                UnavailableError,
            ) as error:  # it, or what it knew, is coming back
                if time.monotonic() >= give_up_at:
                    raise UnavailableError(f"no dtype was agreed on: {error.message}") from error
                time.sleep(_AGAIN_S)
