"""`make bench`: first numbers in one table each, written to bench/results/ and printed.

python -m bench [demo] [engine] [handoff] [path] [router] [placement] [--output FILE]

Every run writes a file of its own: it never touches one that is there.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
from pathlib import Path

from bench import report

RESULTS = Path(__file__).parent / "results"
SECTIONS = {
    "demo": "`baton demo`",
    "handoff": "Handoff beside memcpy",
    "path": "Whole path",
    "router": "The router's own cost",
    "placement": "Placement and prefix index",
    "engine": "Engine beside transformers",
}
"""Modules, with titles for what they print."""
SHORT = {"router": ("--rounds", "1")}
"""Options that make a module take minutes less than by itself."""


def section(name: str) -> str:
    """Run a module as a process of its own: it may set UCX's environment or leave threads."""
    command = [sys.executable, "-m", f"bench.{name}", *SHORT.get(name, ())]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    return f"## {SECTIONS[name]}\n\n{printed}\n"


def begin(output: Path | None, head: str) -> Path:
    """Make a new file with `head`: `output`, or one named after the second. Raises FileExistsError
    if it is there."""
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
        report.say(warning)
    for number, name in enumerate(chosen, 1):
        report.say(f"[{number}/{len(chosen)}] {name}")
        # Written as they come: a long run that is cut short leaves what it has.
        with output.open("a") as file:
            file.write(f"\n{section(name)}")
    report.say(f"done; written to {output}")
    print(output.read_text())


if __name__ == "__main__":
    main()
