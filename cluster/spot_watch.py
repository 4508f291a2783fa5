"""Drains the pod that it runs in when the end of its machine is announced: runs beside Ray in a
worker's container where the machine may be called back.

`python -m cluster.spot_watch --cloud aws --timeout 600`

1. Asks the cloud's metadata service, again and again; one that does not answer is told once, and
   asked on.
2. At a notice it becomes `cluster.pod_drain`, which does what `preStop` does and asks as few: the
   drain may take `--timeout`, but ends before the machine does, so that what still runs then goes
   on elsewhere in order and not when its silence is noticed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Sequence

from cluster.errors import MetadataError
from cluster.spot_notices import CLOUDS, Cloud, Notice

_LOOK_S = 2.0
_LEAVE_S = 5.0  # for workers that have given up their requests to end
_SHORTEST_S = 1.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Does not return: it ends as the drain does."""
    options = _parse(arguments)
    notice = wait_for_notice(CLOUDS[options.cloud](options.address))
    now = datetime.datetime.now(datetime.UTC)
    timeout_s = drain_s(notice, options.timeout, options.notice, now)
    _say(f"this machine ends: {notice.what}, {_when(notice)}")
    limits = [f"--timeout={timeout_s:g}", f"--leave={_LEAVE_S:g}"]
    os.execv(sys.executable, [sys.executable, "-m", "cluster.pod_drain", *limits])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cluster.spot_watch")
    parser.add_argument("--cloud", required=True, choices=sorted(CLOUDS))
    parser.add_argument("--address", default="http://169.254.169.254", metavar="URL")
    parser.add_argument(
        "--notice",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="what a notice leaves that does not say when the machine ends",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        required=True,
        metavar="SECONDS",
        help="how long what runs may take to end where the machine lets it",
    )
    return parser.parse_args(arguments)


def wait_for_notice(cloud: Cloud) -> Notice:
    told = ""
    while True:
        try:
            notice = cloud.look()
        except MetadataError as error:
            if str(error) != told:
                told = str(error)
                _say(f"nobody tells whether this machine ends, asked again: {told}")
        else:
            if notice is not None:
                return notice
            if told:
                _say("the metadata service answers again")
            told = ""
        time.sleep(_LOOK_S)


def drain_s(notice: Notice, timeout_s: float, unsaid_s: float, now: datetime.datetime) -> float:
    """What a drain may take, to its workers' end; `unsaid_s`: the time that a notice leaves which
    tells of none."""
    ends_at = notice.ends_at
    left_s = unsaid_s if ends_at is None else (ends_at - now).total_seconds()
    return max(_SHORTEST_S, min(timeout_s + _LEAVE_S, left_s))


def _when(notice: Notice) -> str:
    return "when is not said" if notice.ends_at is None else f"at {notice.ends_at.isoformat()}"


def _say(text: str) -> None:
    print(f"spot_watch: {text}", flush=True)


if __name__ == "__main__":
    main()
