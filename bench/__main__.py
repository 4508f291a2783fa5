"""`make bench`: first numbers in one table each, written to bench/results/ and printed.

python -m bench [demo] [engine] [handoff] [path] [--output FILE]
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench import machine
from bench.table import markdown

RESULTS = Path(__file__).parent / "results"


_BEGAN = time.monotonic()


def tell(line: str) -> None:
    print(f"{time.monotonic() - _BEGAN:5.0f} s  {line}", file=sys.stderr, flush=True)


def progress(message: str) -> None:
    tell(f"  {message} ...")


def demo_section() -> str:
    from bench import demo

    return f"## `baton demo`\n\n{demo.__doc__}\n{demo.table(demo.measure(progress))}\n"


def engine_section() -> str:
    from bench import checkpoints, engine

    rows = [
        [
            f"{cell.model} {cell.what}",
            f"{cell.baton:.0f}",
            f"{cell.transformers:.0f}",
            f"{cell.ratio:.2f}",
            f"{cell.rounds}",
        ]
        for model in checkpoints.SHAPES
        for cell in engine.measure(model, progress)
    ]
    header = ("random Qwen3, bf16", "Baton tokens/s", "transformers tokens/s", "ratio", "rounds")
    return f"## Engine beside transformers\n\n{engine.__doc__}\n{markdown(header, rows)}\n"


def handoff_section() -> str:
    """In a process of its own: it sets UCX's environment and ends its peers."""
    progress("handoff GB/s beside memcpy")
    answer = subprocess.run(
        [sys.executable, "-m", "bench.handoff"], capture_output=True, text=True, check=True
    )
    return f"## Handoff beside memcpy\n\n```\n{answer.stdout.rstrip()}\n```\n"


def path_section() -> str:
    from bench import checkpoints, path

    parts = [f"## Whole path\n\n{path.__doc__}"]
    demo = Path(__file__).parent.parent / "models" / "demo"
    small = checkpoints.make("0.1B")
    for title, folder, vocab in (
        ("models/demo", demo, 2000),
        ("random Qwen3 0.1B", small, checkpoints.SHAPES["0.1B"].vocab_size),
    ):
        rows = [row.cells() for row in path.measure(folder, vocab, progress)]
        parts.append(f"{title}\n\n{markdown(path.HEADER, rows)}\n")
    return "\n".join(parts)


SECTIONS: dict[str, Callable[[], str]] = {
    "demo": demo_section,
    "handoff": handoff_section,
    "path": path_section,
    "engine": engine_section,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    parser.add_argument("--output", type=Path, default=RESULTS / f"{today}-first-numbers.md")
    options = parser.parse_args()
    chosen = options.sections or list(SECTIONS)
    command = "make bench" if not options.sections else f"python -m bench {' '.join(chosen)}"
    head = f"# Benchmarks of {today}\n\n{machine.describe(command)}\n"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(head)
    if warning := machine.load_warning():
        tell(warning)
    for number, name in enumerate(chosen, 1):
        tell(f"[{number}/{len(chosen)}] {name}")
        # Written as they come: a long run that is cut short leaves what it has.
        with options.output.open("a") as file:
            file.write(f"\n{SECTIONS[name]()}")
    tell(f"done; written to {options.output}")
    print(options.output.read_text())


if __name__ == "__main__":
    main()
