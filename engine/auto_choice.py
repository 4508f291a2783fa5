"""Decide what `device: auto` and `dtype: auto` mean on this machine, in a process of its own.

`python -m engine.auto_choice [--model MODEL --devices DEVICE...]` serves processes without torch.
It prints one JSON object: `device` and `device_reason`; with a model also `dtype` and
`dtype_reason`, for all of the devices together; or `error`.
"""

from __future__ import annotations

import argparse
import json
import sys

from baton.config.engine import AUTO
from engine.device import choose_device
from engine.dtype import choose_dtype
from engine.models.errors import ModelError


def main(*arguments: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.auto_choice", description=__doc__)
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
