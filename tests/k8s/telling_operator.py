"""The operator, which says in its log whatever it is about to ask for, but for what it reads:
`python -m tests.k8s.telling_operator` instead of `python -m deploy.controller`."""

from __future__ import annotations

import sys
from typing import Any

from baton.control_client import ControlClient
from deploy.controller import __main__ as operator
from deploy.controller.kit.connection import Call, Connection, Timeouts

MARK = "asks for "


def main() -> None:
    answer, ask = Connection.answer, ControlClient._call

    def telling_answer(self: Connection, call: Call, timeouts: Timeouts) -> dict[str, Any]:
        if call.method != "GET":
            print(f"{MARK}{call.method} {call.path}", file=sys.stderr, flush=True)
        return answer(self, call, timeouts)

    def telling_ask(
        self: ControlClient, method: str, request: Any, timeout_s: float | None = None
    ) -> Any:
        print(f"{MARK}{method}", file=sys.stderr, flush=True)
        return ask(self, method, request, timeout_s)

    Connection.answer = telling_answer  # type: ignore[method-assign]
    ControlClient._call = telling_ask  # type: ignore[method-assign]
    operator.main()


if __name__ == "__main__":
    main()
