"""`make bench`: first numbers in one table each, written to bench/results/ and printed.

python -m bench [demo] [engine] [handoff] [path] [router] [placement]

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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    options = parser.parse_args(arguments)
    chosen = options.sections or list(SECTIONS)
    command = "make bench" if not options.sections else f"python -m bench {' '.join(chosen)}"
    now = datetime.datetime.now(datetime.UTC)
    output = RESULTS / f"{now:%Y-%m-%d-%H%M%S}.md"
    with output.open("x") as file:
        file.write(f"# Benchmarks of {now:%Y-%m-%d}\n\n{report.describe(command)}\n")
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
