"""What a figure was measured on: every table names it."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def cpu_features() -> str:
    """The instruction sets that decide which kernel runs."""
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0].split()
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return " ".join(flag for flag in wanted if flag in flags)


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def describe(command: str) -> str:
    """A few lines of Markdown: command, date, machine, load average, commit."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return "\n".join(
        (
            f"- command: `{command}`",
            f"- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
            f"- machine: {cpu_name()}, {os.cpu_count()} cores, {gib:.0f} GiB, {cpu_features()}",
            f"- load average before the run: {load}",
            f"- commit: {commit()}",
        )
    )
