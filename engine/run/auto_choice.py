"""What `device: auto` and `dtype: auto` mean on this machine.

`auto` is a GPU where torch can use one, else the CPU; and the checkpoint's own dtype, where every
device computes in it. A CPU without bf16 instructions multiplies float32 about three times as fast
as bfloat16 (measured: 84 against 30 GFLOP/s), so there it is float32. Workers exchange KV in one
dtype only, so the dtype is decided once for all devices that serve a model.

`python -m engine.run.auto_choice [--model MODEL --devices DEVICE...]` serves processes without
torch. It prints one JSON object: `device` and `device_reason`; with a model also `dtype` and
`dtype_reason`, for all of the devices together; or `error`.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Collection
from dataclasses import dataclass

import torch

from baton.config.engine import AUTO, EngineConfig
from engine.engines import DtypeChoice
from engine.errors import ModelError, UnsupportedModelError
from engine.models.checkpoint.folder import resolve
from engine.models.checkpoint.hub import CONFIG
from engine.models.checkpoint.weights import read_json


@dataclass(frozen=True)
class DeviceChoice:
    device: str
    """cpu or cuda."""
    reason: str


def why_no_gpu() -> str | None:
    """Why torch cannot compute on a GPU here, in one sentence; None: it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an old driver is reported below, once
        if torch.cuda.is_available():
            return None
        if torch.version.cuda is None and torch.version.hip is None:
            return f"torch {torch.__version__} is built without CUDA"
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            said = str(error).strip().partition("\n")[0]
            return said.partition(". ")[0].rstrip(".") or type(error).__name__
    return "torch sees no GPU"


def choose_device(num_gpus: int = 1) -> DeviceChoice:
    """Choose what `auto` means on this machine for workers that need `num_gpus` together."""
    reason = why_no_gpu()
    if reason is not None:
        return DeviceChoice("cpu", reason)
    if torch.cuda.device_count() < num_gpus:
        return DeviceChoice(
            "cpu",
            f"the pools need {num_gpus} GPUs, this machine has {torch.cuda.device_count()}; make"
            " them smaller, or one pool of role mixed",
        )
    return DeviceChoice("cuda", torch.cuda.get_device_name())


def device_of(config: EngineConfig) -> torch.device:
    """The device that an engine of this configuration computes on."""
    return torch.device(choose_device().device if config.device == AUTO else config.device)


# As torch.cpu.get_capabilities names them, of x86 and of ARM.
_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
# What holds the same values, nearest first; float32 holds them all and is computed everywhere.
_INSTEAD_OF = {
    "float32": (),
    "bfloat16": ("float32",),
    "float16": ("bfloat16", "float32"),
}


def choose_dtype(
    model_path: str, devices: Collection[str], revision: str | None = None
) -> DtypeChoice:
    """Choose the dtype of a model's weights, activations and KV on all of `devices`, each cpu or
    cuda. `revision`: of a model on the hub.

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
    """Return the dtype that config.json names. Raises ModelError."""
    folder = resolve(model_path, revision, CONFIG)
    config = read_json(folder / "config.json")
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    named = config.get(key)
    if named not in _INSTEAD_OF:
        raise UnsupportedModelError(
            f"{folder / 'config.json'}: {key} names no dtype that the engine computes in"
            f" ({named!r}): set engine.dtype to one of {', '.join(_INSTEAD_OF)}"
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
    """Whether the CPU computes in bf16; False if torch is too old to know. float32 is right
    everywhere, if not the fastest."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    return capabilities is not None and any(map(capabilities().get, _BF16_INSTRUCTIONS))


def main(*arguments: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.run.auto_choice", description=__doc__)
    parser.add_argument("--model", help="choose a dtype, too")
    parser.add_argument("--devices", nargs="+", choices=(AUTO, "cpu", "cuda"), default=[AUTO])
    parser.add_argument("--gpus", type=int, default=1, help="that the workers need together")
    parser.add_argument("--revision", help="of a model on the Hugging Face hub")
    options = parser.parse_args(arguments)
    here = choose_device(options.gpus)
    chosen = {"device": here.device, "device_reason": here.reason}
    if options.model is not None:
        devices = {here.device if device == AUTO else device for device in options.devices}
        try:
            dtype = choose_dtype(options.model, devices, options.revision)
        except ModelError as error:
            chosen = {"error": str(error)}
        else:
            chosen |= {"dtype": dtype.dtype, "dtype_reason": dtype.reason}
    print(json.dumps(chosen))


if __name__ == "__main__":
    main(*sys.argv[1:])
