"""What a benchmark reports: how far it is, the machine that it runs on, tables in Markdown."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_BEGAN = time.monotonic()


def say(line: str) -> None:
    print(f"{time.monotonic() - _BEGAN:5.0f} s  {line}", file=sys.stderr, flush=True)


def progress(message: str) -> None:
    say(f"  {message} ...")


# --- the machine ----------------------------------------------------------------------------------


IDLE_LOAD_PER_CORE = 0.5


def _cpu() -> dict[str, str]:
    """Return what the kernel says of the first core, by name."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def cpu_features() -> list[str]:
    """List the instructions that this machine's kernels are chosen by."""
    chosen_by = {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}
    return sorted(chosen_by.intersection(_cpu().get("flags", "").split()))


def first_line(*command: str) -> str:
    """Return the first line that a program prints; empty where the machine lacks it."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return answer.stdout.strip().partition("\n")[0]


def load_warning() -> str:
    """Return a warning if other work runs beside a benchmark; empty on an idle machine."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= IDLE_LOAD_PER_CORE * cores:
        return ""
    return (
        f"OTHER WORK RAN BESIDE THIS: load average {load:.1f} on {cores} cores before the run, "
        f"above {IDLE_LOAD_PER_CORE:g} per core. Absolute figures below mean nothing; measure again"
    )


def describe(command: str) -> str:
    """Describe a run in Markdown: command, date, machine, load average, commit; a warning first."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    warning, cpu = load_warning(), _cpu()
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = cpu.get("model name", platform.processor())
    differ = ("cpu family", "model", "stepping", "cache size")  # between CPUs of one name
    kind = ", ".join(f"{name} {cpu[name]}" for name in differ if name in cpu)
    return "\n".join(
        (
            *([f"> **{warning}.**\n"] if warning else []),
            f"- command: `{command}`",
            f"- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
            f"- machine: {name}, {os.cpu_count()} cores, {gib:.0f} GiB, {' '.join(cpu_features())}",
            f"- CPU: {kind}",
            f"- load average before the run: {load}",
            f"- commit: {first_line('git', 'describe', '--always', '--dirty') or 'unknown'}",
        )
    )


# --- tables ---------------------------------------------------------------------------------------


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with columns as wide as their widest cell; all but the first align right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join((line(header), line(rule), *(line(row) for row in rows)))


class Report:
    """What one part of `bench.gpu` finds: printed, and written to `folder`/PART.md, as it comes."""

    def __init__(self, part: str, machine: str, folder: Path | None = None) -> None:
        self.failed = False
        self.left_out: list[str] = []
        """What could not be run, and why."""
        self._file = None if folder is None else folder / f"{part}.md"
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text("")
        self._write(f"# bench.gpu: {part}\n\n{machine}")

    def add(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._write(f"\n### {title}\n\n{markdown(header, rows)}")

    @contextmanager
    def table(self, title: str, header: Sequence[str]) -> Iterator[list[Sequence[str]]]:
        """Rows for the caller to fill in. An error keeps those that are there."""
        rows: list[Sequence[str]] = []
        try:
            yield rows
        finally:
            if rows:
                self.add(title, header, rows)

    def leave_out(self, why: str) -> None:
        self.left_out.append(why)
        self._write(f"\nleft out: {why}")

    def _write(self, text: str) -> None:
        print(text, flush=True)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(f"{text}\n")
