"""Where each session ran last, so that its next request goes there if that costs nothing."""

from __future__ import annotations

from collections import OrderedDict

MAX_SESSIONS = 1 << 16


class Sessions:
    """Own the last decode worker of each session, as (worker id, incarnation). A session is named
    by tenant and id. The one that was quiet for longest is forgotten first."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._workers: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def last(self, session: tuple[str, str]) -> tuple[str, int] | None:
        return self._workers.get(session)

    def ran_on(self, session: tuple[str, str], worker: tuple[str, int]) -> None:
        self._workers[session] = worker
        self._workers.move_to_end(session)
        if len(self._workers) > self._max_sessions:
            self._workers.popitem(last=False)
