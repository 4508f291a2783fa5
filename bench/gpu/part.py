"""One part of `bench.gpu` as a process: `python -m bench.gpu.part PART DEVICE [FOLDER]`."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import torch

from bench import machine
from bench.gpu import speed, tests_part, transfer
from bench.gpu.report import Report

RUN = {"tests": tests_part.run, "speed": speed.run, "transfer": transfer.run}


def describe(device: torch.device, part: str) -> str:
    lines = [machine.describe(f"python -m bench.gpu --part {part} --device {device}")]
    lines.append(f"- torch: {torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gib = properties.total_memory / (1 << 30)
        lines.append(f"- GPU: {properties.name}, {gib:.0f} GiB, driver {machine.gpu_driver()}")
    return "\n".join(lines)


def main(part: str, device_name: str, folder: str | None = None) -> int:
    """The exit status of `bench.gpu`. Tables that were measured before an error are written."""
    device = torch.device(device_name)
    report = Report(part, describe(device, part))
    print(f"## {part}\n\n{report.machine}", flush=True)
    try:
        RUN[part](device, report)
    except Exception:  # noqa: BLE001 - a part's outermost frame
        traceback.print_exc()
        report.failed = True
    finally:
        if folder is not None:
            report.write(Path(folder))
    if report.failed:
        return 1
    return 2 if report.left_out else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
