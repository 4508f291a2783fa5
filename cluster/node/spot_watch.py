"""Drains the pod that it runs in when the end of its machine is announced: runs beside Ray in a
worker's container where the machine may be called back.

`python -m cluster.node.spot_watch --cloud aws --timeout 600`

1. Asks the cloud's metadata service, again and again; one that does not answer is told once, and
   asked on.
2. At a notice it runs `cluster.node.pod_drain`, which does what `preStop` does and asks as few: the
   drain may take `--timeout`, but ends before the machine does, so that what still runs then goes
   on elsewhere in order and not when its silence is noticed. A worker that still loads by then
   leaves when it has loaded: the container goes on, and so would it.
3. A machine that goes on after its end (it was hibernated, say, and woke up) keeps a pod whose node
   has left Ray: after `--restart-after` the process that started this one, the container's own, is
   ended. Started anew, the container believes that notice no more. One without a time is believed
   for good.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from cluster.errors import MetadataError
from cluster.node.spot_notices import CLOUDS, Cloud, Notice

_LOOK_S = 2.0
_LEAVE_S = 5.0  # for workers that have given up their requests to end
_SHORTEST_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the drain's status."""
    container = os.getppid()
    options = _parse(arguments)
    outlived_s: float = options.restart_after
    notice = wait_for_notice(CLOUDS[options.cloud](options.address), outlived_s)
    timeout_s = drain_s(notice, options.timeout, options.notice, _now())
    _say(f"this machine ends: {notice.what}, {_when(notice)}")
    limits = [f"--timeout={timeout_s:g}", f"--leave={_LEAVE_S:g}", f"--close-for={container}"]
    drain = [sys.executable, "-m", "cluster.node.pod_drain", *limits]
    status = subprocess.run(drain, check=False).returncode
    if notice.ends_at is not None and math.isfinite(outlived_s):
        while not is_outlived(notice, outlived_s, _now()):
            time.sleep(_LOOK_S)
        _say("this machine goes on: its container ends, to be started anew")
        if os.getppid() == container:
            os.kill(container, signal.SIGTERM)
    return status


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cluster.node.spot_watch")
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
    parser.add_argument(
        "--restart-after",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="after the end that was announced: end the process that started this one",
    )
    return parser.parse_args(arguments)


def wait_for_notice(cloud: Cloud, outlived_s: float) -> Notice:
    """One whose time is over since `outlived_s` is none."""
    told = ""
    while True:
        try:
            notice = cloud.look()
        except MetadataError as error:
            if str(error) != told:
                told = str(error)
                _say(f"nobody tells whether this machine ends, asked again: {told}")
        else:
            if notice is not None and not is_outlived(notice, outlived_s, _now()):
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


def is_outlived(notice: Notice, by_s: float, now: datetime.datetime) -> bool:
    return notice.ends_at is not None and (now - notice.ends_at).total_seconds() >= by_s


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _when(notice: Notice) -> str:
    return "when is not said" if notice.ends_at is None else f"at {notice.ends_at.isoformat()}"


def _say(text: str) -> None:
    print(f"spot_watch: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
