"""The operator, which logs each call before it makes it, but for those that only read:
`python -m tests.k8s.logging_operator` instead of `python -m deploy.controller`."""

from __future__ import annotations

import sys
from typing import Any

from baton.control.client import ControlClient
from deploy.controller import __main__ as operator
from deploy.controller.kit.connection import Call, Connection, Timeouts

MARK = "asks for "


def main() -> None:
    answer, ask = Connection.answer, ControlClient._call

    def logged_answer(self: Connection, call: Call, timeouts: Timeouts) -> dict[str, Any]:
        if call.method != "GET":
            print(f"{MARK}{call.method} {call.path}", file=sys.stderr, flush=True)
        return answer(self, call, timeouts)

    def logged_ask(
        self: ControlClient, method: str, request: Any, timeout_s: float | None = None
    ) -> Any:
        print(f"{MARK}{method}", file=sys.stderr, flush=True)
        return ask(self, method, request, timeout_s)

    Connection.answer = logged_answer  # type: ignore[method-assign]
    ControlClient._call = logged_ask  # type: ignore[method-assign]
    operator.main()


if __name__ == "__main__":
    main()
