"""`make bench`: first numbers in one table each, written to bench/results/ and printed.

python -m bench [demo] [engine] [handoff] [path] [router] [--output FILE]

Every run writes a file of its own: it never touches one that is there.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench import report
from bench.report import markdown

RESULTS = Path(__file__).parent / "results"


_BEGAN = time.monotonic()


def say(line: str) -> None:
    print(f"{time.monotonic() - _BEGAN:5.0f} s  {line}", file=sys.stderr, flush=True)


def progress(message: str) -> None:
    say(f"  {message} ...")


def demo_section() -> str:
    from bench import demo

    return f"## `baton demo`\n\n{demo.__doc__}\n{demo.table(demo.measure(progress))}\n"


def engine_section() -> str:
    from bench import engine, random_model

    rows = [
        [
            f"{cell.model} {cell.what}",
            f"{cell.baton:.0f}",
            f"{cell.transformers:.0f}",
            f"{cell.ratio:.2f}",
            f"{cell.rounds}",
        ]
        for model in random_model.ON_DISK
        for cell in engine.measure(model, progress)
    ]
    header = ("random Qwen3, bf16", "Baton tokens/s", "transformers tokens/s", "ratio", "rounds")
    return f"## Engine beside transformers\n\n{engine.__doc__}\n{markdown(header, rows)}\n"


def printed_by(module: str) -> str:
    """What a benchmark prints that runs as a process of its own."""
    command = [sys.executable, "-m", module]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.rstrip()


def handoff_section() -> str:
    """A process of its own: it sets UCX's environment and ends its peers."""
    progress("handoff GB/s beside memcpy")
    return f"## Handoff beside memcpy\n\n{printed_by('bench.handoff')}\n"


def router_section() -> str:
    """A process of its own: it times placement, and gRPC leaves threads behind."""
    from bench import router

    progress("router between a client and workers that cost nothing")
    return f"## The router's own cost\n\n{router.__doc__}\n{printed_by('bench.router')}\n"


def path_section() -> str:
    from bench import path, random_model

    parts = [f"## Whole path\n\n{path.__doc__}"]
    demo = Path(__file__).parent.parent / "models" / "demo"
    small = random_model.saved("0.1B")
    for title, folder, vocab in (
        ("models/demo", demo, 2000),
        ("random Qwen3 0.1B", small, random_model.SHAPES["0.1B"].vocab_size),
    ):
        rows = [row.cells() for row in path.measure(folder, vocab, progress)]
        parts.append(f"{title}\n\n{markdown(path.HEADER, rows)}\n")
    return "\n".join(parts)


SECTIONS: dict[str, Callable[[], str]] = {
    "demo": demo_section,
    "handoff": handoff_section,
    "path": path_section,
    "router": router_section,
    "engine": engine_section,
}


def begin(output: Path | None, head: str) -> Path:
    """A new file with `head`: `output`, or one named after the second. FileExistsError if it is
    there."""
    if output is None:
        output = RESULTS / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d-%H%M%S}.md"
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("x") as file:
        file.write(head)
    return output


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    parser.add_argument("--output", type=Path, metavar="FILE", help="a new file for the tables")
    options = parser.parse_args(arguments)
    chosen = options.sections or list(SECTIONS)
    command = "make bench" if not options.sections else f"python -m bench {' '.join(chosen)}"
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    try:
        output = begin(options.output, f"# Benchmarks of {today}\n\n{report.describe(command)}\n")
    except FileExistsError as error:
        parser.error(f"{error.filename} is there already; a run writes a file of its own")
    if warning := report.load_warning():
        say(warning)
    for number, name in enumerate(chosen, 1):
        say(f"[{number}/{len(chosen)}] {name}")
        # Written as they come: a long run that is cut short leaves what it has.
        with output.open("a") as file:
            file.write(f"\n{SECTIONS[name]()}")
    say(f"done; written to {output}")
    print(output.read_text())


if __name__ == "__main__":
    main()
