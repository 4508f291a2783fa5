"""What `dtype: auto` means: the checkpoint's own dtype, where every device computes in it.

A CPU without bf16 instructions multiplies float32 about three times as fast as bfloat16 (measured:
84 against 30 GFLOP/s), so there it is float32.

KV is exchanged only between workers of one dtype, so the dtype is decided once for all devices that
serve a model (`engine.auto_choice`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from engine.models.errors import CheckpointError, UnsupportedModelError
from engine.models.folder import resolve
from engine.models.hub import CONFIG
from engine.weights import Checkpoint, read_json

# As torch.cpu.get_capabilities names them, of x86 and of ARM.
_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
# What holds the same values, nearest first; float32 holds them all and is computed everywhere.
_INSTEAD_OF = {
    "float32": (),
    "bfloat16": ("float32",),
    "float16": ("bfloat16", "float32"),
}


@dataclass(frozen=True)
class DtypeChoice:
    dtype: str
    reason: str
    """Why, in words that follow on the dtype and a colon."""


def choose_dtype(
    model_path: str, devices: Collection[str], revision: str | None = None
) -> DtypeChoice:
    """The dtype of a model's weights, activations and KV on all of `devices`, each cpu or cuda.
    `revision`: of a model on the hub.

    Raises ModelError.
    """
    own = own_dtype(model_path, revision)
    computed = {device: _computed_on(device) for device in devices}
    for dtype in (own, *_INSTEAD_OF[own]):
        if all(dtype in dtypes for dtypes in computed.values()):
            break
    if dtype == own:
        return DtypeChoice(dtype, "the checkpoint's own dtype")
    lacking = " and ".join(sorted(d for d, dtypes in computed.items() if own not in dtypes))
    reason = f"the checkpoint is in {own}, for which the {lacking} here has no instructions"
    return DtypeChoice(dtype, reason)


def own_dtype(model_path: str, revision: str | None = None) -> str:
    """The dtype that config.json names, or else the one that most of the weights are in, which are
    fetched for nothing else.

    Raises ModelError.
    """
    folder = resolve(model_path, revision, CONFIG)
    config = read_json(folder / "config.json")
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    named = config.get(key)
    if named is None:
        try:
            with Checkpoint(resolve(model_path, revision)) as checkpoint:
                named = checkpoint.dtype()
        except CheckpointError as error:  # the process that decides for others may have no weights
            raise CheckpointError(
                f"{error}, and config.json names no dtype: set engine.dtype"
            ) from error
    if named not in _INSTEAD_OF:
        raise UnsupportedModelError(
            f"{folder / 'config.json'}: {key}: no dtype that the engine computes in: {named!r}; "
            f"set engine.dtype to one of {', '.join(_INSTEAD_OF)}"
        )
    return str(named)


def _computed_on(device: str) -> set[str]:
    """The dtypes that the device has instructions for, as far as torch knows."""
    if device == "cpu":
        return {"float32", "bfloat16"} if cpu_has_bf16() else {"float32"}
    # A machine that only decides for others may have no GPU; of theirs nothing is known.
    lacks_bf16 = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(
        including_emulation=False
    )
    return {"float32", "float16"} if lacks_bf16 else {"float32", "float16", "bfloat16"}


def cpu_has_bf16() -> bool:
    """False if torch is too old to know. float32 is right everywhere, if not the fastest."""
    tell = getattr(torch.cpu, "get_capabilities", None)
    return tell is not None and any(tell().get(name) for name in _BF16_INSTRUCTIONS)
