"""Show what the user waits for: a spinner with seconds on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.text import Text

_SHOW_TENTHS_AFTER_S = 0.05


class Steps:
    """One step after the other: announcing a step ends the one before it.

    `steps("loading weights")` is what bring-up code calls. Finished steps stay on the screen with
    the time they took.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._message: str | None = None
        self._started = 0.0
        self._live: Progress | None = None

    def __call__(self, message: str) -> None:
        self.done()
        self._message, self._started = message, time.monotonic()
        if self._console.is_terminal:
            self._live = _line(self._console, message)
            self._live.start()
        else:
            self._console.print(f"{message} ...", highlight=False, markup=False)

    def detail(self, text: str) -> None:
        """Show how far the current step has come: on its line, or on one of its own elsewhere."""
        if self._live is not None:
            (task,) = self._live.task_ids
            self._live.update(task, description=escape(f"{self._message}: {text}"))
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


def spinner(console: Console, message: str) -> ExitStack:
    """Show a spinner during a wait that is usually short, and leave nothing behind. It is shown on
    a terminal alone, until it is closed."""
    shown = ExitStack()
    if console.is_interactive:
        shown.enter_context(_line(console, message))
    return shown


def _line(console: Console, message: str) -> Progress:
    columns = SpinnerColumn(style="cyan"), "{task.description}", TimeElapsedColumn()
    line = Progress(*columns, console=console, transient=True)
    line.add_task(escape(message))
    return line
