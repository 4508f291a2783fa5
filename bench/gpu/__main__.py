"""Prove the GPU path of this machine, and measure it.

    python -m bench.gpu [--part tests|speed|transfer] [--device cuda|cpu] [--out FOLDER]

Needs Linux, Python 3.12, torch with CUDA, numpy, safetensors and pytest; no Ray, gRPC or network.
`transfer` also needs libucx and protobuf, and names what is missing. Each part takes less than
8 minutes, prints its tables as they come, and writes PART.json and PART.md into `--out`.
`--device cpu` runs the same code in small sizes, as the project's tests do.

Exit status: 0, all ran; 1, a test or a part failed; 2, something could not run here and is named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from bench import machine
from bench.gpu.report import Report
from engine.device import why_no_gpu

PARTS = ("tests", "speed", "transfer")


def run_part(part: str, device: torch.device, report: Report) -> None:
    if part == "tests":
        from bench.gpu import tests_part

        tests_part.run(device, report)
    elif part == "speed":
        from bench.gpu import speed

        speed.run(device, report)
    else:
        from bench.gpu import transfer

        transfer.run(device, report)


def describe(device: torch.device, part: str) -> str:
    lines = [machine.describe(f"python -m bench.gpu --part {part} --device {device}")]
    lines.append(f"- torch: {torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gib = properties.total_memory / (1 << 30)
        lines.append(f"- GPU: {properties.name}, {gib:.0f} GiB, driver {machine.gpu_driver()}")
    return "\n".join(lines)


def main(arguments: list[str], no_gpu: Callable[[], str | None] = why_no_gpu) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=PARTS, help="one part; default: all, one after the other")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="a folder for PART.json and PART.md")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and (reason := no_gpu()) is not None:
        print(f"no GPU to measure: {reason}. `--device cpu` runs in small", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    status = 0
    for part in [options.part] if options.part else PARTS:
        report = Report(part, describe(device, part))
        print(f"## {part}\n\n{report.machine}", flush=True)
        try:
            run_part(part, device, report)
        finally:
            if options.out is not None:
                report.write(options.out)
        if report.failed:
            status = 1
        elif report.left_out and status == 0:
            status = 2
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
