"""What a benchmark writes: the machine that it ran on, and tables in Markdown."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

# --- the machine ----------------------------------------------------------------------------------


IDLE_LOAD_PER_CORE = 0.5


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _cpu_kind() -> str:
    """What differs between CPUs of one name: family, model, stepping, last-level cache."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    lines = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    names = ("cpu family", "model", "stepping", "cache size")
    return ", ".join(f"{name} {fields[name]}" for name in names if name in fields)


def _cpu_features() -> str:
    """The instruction sets that decide which kernel runs."""
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0].split()
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return " ".join(flag for flag in wanted if flag in flags)


def _first_line(*command: str) -> str:
    """What a program prints; empty where the machine lacks it."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return answer.stdout.strip().partition("\n")[0]


def gpu_driver() -> str:
    """The NVIDIA driver's version; empty where there is none."""
    return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def load_warning() -> str:
    """A warning if other work runs beside a benchmark; empty on an idle machine."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= IDLE_LOAD_PER_CORE * cores:
        return ""
    return (
        f"OTHER WORK RAN BESIDE THIS: load average {load:.1f} on {cores} cores before the run, "
        f"above {IDLE_LOAD_PER_CORE:g} per core. Absolute figures below mean nothing; measure again"
    )


def describe(command: str) -> str:
    """A few lines of Markdown: command, date, machine, load average, commit; a warning first."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    warning = load_warning()
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return "\n".join(
        (
            *([f"> **{warning}.**\n"] if warning else []),
            f"- command: `{command}`",
            f"- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
            f"- machine: {_cpu_name()}, {os.cpu_count()} cores, {gib:.0f} GiB, {_cpu_features()}",
            f"- CPU: {_cpu_kind()}",
            f"- load average before the run: {load}",
            f"- commit: {_first_line('git', 'describe', '--always', '--dirty') or 'unknown'}",
        )
    )


# --- tables ---------------------------------------------------------------------------------------


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with columns as wide as their widest cell; all but the first align right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join((line(header), line(rule), *(line(row) for row in rows)))


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        return f"### {self.title}\n\n{markdown(self.header, self.rows)}\n"


@dataclass
class Report:
    """What one part of `bench.gpu` found. `add` and `leave_out` print at once."""

    part: str
    machine: str
    tables: list[Table] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What could not be run, and why."""
    failed: bool = False

    def add(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(title, tuple(header), tuple(tuple(row) for row in rows))
        self.tables.append(table)
        print(f"\n{table.text()}", flush=True)

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
        print(f"left out: {why}", flush=True)

    def write(self, folder: Path) -> None:
        """`PART.json` and `PART.md`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.part}.json").write_text(json.dumps(asdict(self), indent=1))
        lines = [f"# bench.gpu: {self.part}", "", self.machine, ""]
        lines += [table.text() for table in self.tables]
        lines += [f"left out: {why}" for why in self.left_out]
        (folder / f"{self.part}.md").write_text("\n".join(lines).rstrip() + "\n")
