"""Tokens that came too early wait for those before them."""

from __future__ import annotations

from baton.v1 import worker_pb2


class EarlyTokens:
    """Own the runs of tokens of one attempt that are not put out yet."""

    def __init__(self) -> None:
        self._runs: list[worker_pb2.RequestTokens] = []

    def __len__(self) -> int:
        return len(self._runs)

    def keep(self, run: worker_pb2.RequestTokens) -> None:
        self._runs.append(run)

    def take_all(self) -> list[worker_pb2.RequestTokens]:
        """As they came."""
        runs, self._runs = self._runs, []
        return runs

    def next_after(self, num_emitted: int) -> worker_pb2.RequestTokens | None:
        """The first run, if no gap is before it."""
        first = min(self._runs, key=lambda run: run.index, default=None)
        if first is None or first.index > num_emitted:
            return None
        self._runs.remove(first)
        return first
