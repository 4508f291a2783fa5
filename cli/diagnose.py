"""`baton diagnose`: what slows requests down, the likeliest cause first, and what to do."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from baton import render
from baton.errors import BatonError, UnavailableError
from cli.ask import TOKEN

_ANSWER_S = 10.0


def asked(address: str) -> list[Any]:
    """Seconds, figures and findings, as a router's page shows them. Raises BatonError."""
    headers = {"authorization": f"Bearer {token}"} if (token := os.environ.get(TOKEN)) else {}
    try:
        with urlopen(Request(f"http://{address}/events", headers=headers), timeout=_ANSWER_S) as it:
            return list(json.loads(it.readline().removeprefix(b"data: "))["diagnosis"])
    except HTTPError as error:
        why = f"{address} answers {error.code}: BATON_TOKEN must hold an operator's token"
        raise BatonError(why) from error
    except (OSError, ValueError, KeyError) as error:
        raise UnavailableError(f"no diagnosis from {address}: {error}") from error


def diagnose(arguments: argparse.Namespace) -> int:
    """Raises BatonError."""
    arguments.unreachable = "Set router.metrics.port, and name it with --metrics HOST:PORT."
    (seconds, figures, findings), out = asked(arguments.metrics), render.out()
    for number, (cause, says, action) in enumerate(findings, 1):
        out.print(f"{number}. {cause}: {says}\n   {action}", markup=False)
    if not findings:
        out.print("nothing stands out: first tokens and gaps are within their targets")
    out.print(render.table(f"\nLast {seconds:.0f} s", ("figure", ">value"), figures))
    return 0
