"""A command at a terminal of its own, driven as a person would: typed to, read from."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence

CTRL_C, CTRL_D = "\x03", "\x04"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


def default_signals() -> None:
    """Tests run in the background have SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """Runs `command`; a context manager that ends it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**env, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "50"},
            start_new_session=True,
            preexec_fn=self._take_terminal,
        )
        os.close(slave)
        self._shown = ""

    @staticmethod
    def _take_terminal() -> None:
        default_signals()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str, timeout_s: float = 30.0) -> str:
        """Read until `pattern` is shown; what was shown up to its end, and is forgotten."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            plain = _ESCAPES.sub("", self._shown)
            found = re.search(pattern, plain)
            if found is not None:
                self._shown = plain[found.end() :]
                return plain[: found.end()]
            left_s = give_up_at - time.monotonic()
            readable, _, _ = select.select([self._master], [], [], max(0.0, left_s))
            assert readable, f"no {pattern!r} within {timeout_s} s in: {plain}"
            try:
                self._shown += os.read(self._master, 4096).decode(errors="replace")
            except OSError as error:  # the command has ended
                raise AssertionError(f"ended without {pattern!r}: {plain}") from error

    def exit_status(self, timeout_s: float = 30.0) -> int:
        return self._process.wait(timeout_s)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._master)
