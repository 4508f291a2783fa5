"""What a figure was measured on: every table names it."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

IDLE_LOAD_PER_CORE = 0.5


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def cpu_kind() -> str:
    """What differs between CPUs of one name: family, model, stepping, last-level cache."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    lines = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    names = ("cpu family", "model", "stepping", "cache size")
    return ", ".join(f"{name} {fields[name]}" for name in names if name in fields)


def cpu_features() -> str:
    """The instruction sets that decide which kernel runs."""
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0].split()
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return " ".join(flag for flag in wanted if flag in flags)


def gpu_driver() -> str:
    """The NVIDIA driver's version; empty where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return answer.stdout.strip().partition("\n")[0]


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return answer.stdout.strip() or "unknown"


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
            f"- machine: {cpu_name()}, {os.cpu_count()} cores, {gib:.0f} GiB, {cpu_features()}",
            f"- CPU: {cpu_kind()}",
            f"- load average before the run: {load}",
            f"- commit: {commit()}",
        )
    )
