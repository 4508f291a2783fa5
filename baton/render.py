"""How the command line prints: quantities with their units, and aligned tables."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_WIDTH_WITHOUT_TERMINAL = 200  # tables in a pipe are not cut


@functools.cache
def out() -> Console:
    return _console(stderr=False)


@functools.cache
def err() -> Console:
    """Return the console for progress and errors, so that answers can be piped on."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(
        stderr=stderr, highlight=False, width=None if is_terminal else _WIDTH_WITHOUT_TERMINAL
    )


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Group:
    """Make a table. Columns whose name begins with ">" are flushed right. Where the terminal is too
    narrow, the last columns are left out and the title says how many: put what matters first."""
    console = out()
    shown = len(columns)
    made = _table(columns, rows)
    unlimited = console.options.update(max_width=10_000)
    while shown > 1 and Measurement.get(console, unlimited, made).maximum > console.width:
        shown -= 1
        made = _table(columns[:shown], [row[:shown] for row in rows])
    heading = Text(title, style="bold", no_wrap=True, overflow="ellipsis")
    if hidden := len(columns) - shown:
        more = "one more column does" if hidden == 1 else f"{hidden} more columns do"
        heading.append(f"  ({more} not fit)", style="not bold dim")
    return Group(heading, made, Text())


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    result = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        name = column.removeprefix(">")
        result.add_column(name, justify="left" if name == column else "right", no_wrap=True)
    for row in rows:
        result.add_row(*row)
    return result


def milliseconds(value: float) -> str:
    """Write a time with the digits that matter: 0.42 ms, 4.2 ms, 42 ms, 4.2 s."""
    if value == 0:
        return "0 ms"
    if value >= 1000:
        return f"{value / 1000:.1f} s"
    if value >= 100:
        return f"{value:.0f} ms"
    return f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"


def num_bytes(value: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError(value)


def bandwidth(num: float, milliseconds: float) -> str:
    """Write the bandwidth of `num` bytes in that time; "-" where nothing moved."""
    if not num or not milliseconds:
        return "-"
    per_s = num / milliseconds * 1e3
    return f"{per_s / 1e9:.1f} GB/s" if per_s >= 1e8 else f"{per_s / 1e6:.0f} MB/s"


def rate(value: float, unit: str) -> str:
    return "-" if not value else f"{value:,.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
