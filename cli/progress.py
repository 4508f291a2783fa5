"""Show what the user waits for: a spinner with seconds on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.status import Status
from rich.table import Table
from rich.text import Text

_SHOW_SECONDS_AFTER_S = 1.0
_SHOW_TENTHS_AFTER_S = 0.05


class _Waiting:
    """What `Live` draws: spinner, message and, once it lasts, the seconds."""

    def __init__(self, message: str, started: float) -> None:
        self._message = message
        self._started = started
        self._spinner = Spinner("dots", style="cyan")

    def __rich__(self) -> Table:
        elapsed_s = time.monotonic() - self._started
        seconds = f"{elapsed_s:.0f} s" if elapsed_s >= _SHOW_SECONDS_AFTER_S else ""
        line = Table.grid(padding=(0, 1))
        line.add_row(self._spinner, Text(self._message), Text(seconds, style="dim"))
        return line


class Steps:
    """One step after the other: announcing a step ends the one before it.

    `steps("loading weights")` is what bring-up code calls. Finished steps stay on the screen with
    the time they took.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._message: str | None = None
        self._started = 0.0
        self._live: Live | None = None

    def __call__(self, message: str) -> None:
        self.done()
        self._message, self._started = message, time.monotonic()
        if self._console.is_terminal:
            waiting = _Waiting(message, self._started)
            self._live = Live(waiting, console=self._console, transient=True, refresh_per_second=10)
            self._live.start()
        else:
            self._console.print(f"{message} ...", highlight=False, markup=False)

    def detail(self, text: str) -> None:
        """How far the current step has come: on its line, or on one of its own elsewhere."""
        if self._live is not None:
            self._live.update(_Waiting(f"{self._message}: {text}", self._started))
        else:
            self._console.print(f"{self._message}: {text} ...", highlight=False, markup=False)

    def done(self, *, failed: bool = False) -> None:
        """End the current step, if there is one."""
        if self._message is None:
            return
        message, self._message = self._message, None
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        took_s = time.monotonic() - self._started
        elapsed = f"{took_s:.1f} s" if took_s >= _SHOW_TENTHS_AFTER_S else ""
        mark, style = ("✗", "red") if failed else ("✓", "green")
        line = Text.assemble((mark, style), " ", message, " ", (elapsed, "dim"))
        self._console.print(line, highlight=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.done(failed=kind is not None)


def spinner(console: Console, message: str) -> Status:
    """For a wait that is usually short; leaves nothing behind. Shown on a terminal alone."""
    return console.status(message, spinner_style="cyan")
