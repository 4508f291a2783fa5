"""Prove the GPU path of this machine, and measure it.

    python -m bench.gpu [--part tests|speed|transfer] [--device cuda|cpu] [--out FOLDER]

Needs Linux, Python 3.12, torch with CUDA, numpy, safetensors and pytest; no Ray, gRPC or network.
`transfer` also needs libucx and protobuf, and names what is missing. Each part is a process of its
own that takes 8 minutes at most. It prints its tables as they come, and writes PART.json and
PART.md into `--out`. `--device cpu` runs the same code in small sizes, as the project's tests do.

Exit status: 0, all ran; 1, a test or a part failed; 2, something could not run here and is named.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from engine.auto_choice import why_no_gpu

PARTS = ("tests", "speed", "transfer")
PART_S = 480.0
_ROOT = Path(__file__).parents[2]


def run_part(part: str, device: str, out: Path | None) -> int:
    """The part's exit status; 1 where its time is over."""
    command = [sys.executable, "-m", "bench.gpu.part", part, device]
    if out is not None:
        command.append(str(out.resolve()))
    try:
        return subprocess.run(command, cwd=_ROOT, timeout=PART_S, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"{part} was not over after {PART_S:g} s", flush=True)
        return 1


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
    parts = [options.part] if options.part else PARTS
    statuses = {run_part(part, options.device, options.out) for part in parts}
    if statuses - {0, 2}:
        return 1
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
