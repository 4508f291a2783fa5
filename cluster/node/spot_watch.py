"""Drains its own pod when the cloud announces the machine's end. Runs beside Ray in a worker's
container on spot capacity.

`python -m cluster.node.spot_watch --cloud aws --timeout 600`

1. It polls the cloud's metadata service. It logs a failure once and keeps polling.
2. At a notice it runs `cluster.node.pod_drain`, as `preStop` does. The drain may take `--timeout`,
   but ends before the machine does. So requests that still run then move elsewhere in order, not
   when their worker's silence is noticed. A worker that still loads exits when it has loaded.
3. If the machine survives its announced end (after hibernation, say), its Ray node is gone. After
   `--restart-after` this process ends the container's main process, which started it. The restarted
   container ignores that notice. A notice without a time is never ignored.

| cloud | request | notice |
| --- | --- | --- |
| aws | `spot/instance-action`, with a token of IMDSv2 | any answer but 404, with its time |
| gcp | `instance/preempted`, which answers once it changes | `TRUE`, without a time |
| azure | `scheduledevents` | Preempt or Terminate of this machine, with its earliest time |

AWS's rebalance recommendation is no notice: nothing ends yet. Paths and answers are as in the
clouds' documentation.
"""

from __future__ import annotations

import abc
import argparse
import datetime
import http.client
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from baton.process.log import LogSettings, set_up_logging
from cluster.errors import MetadataError

log = logging.getLogger("spot_watch")

_ANSWER_WITHIN_S = 5.0
_MOST_BYTES = 1 << 20

_TOKEN = "/latest/api/token"
_TOKEN_TTL_S = 21_600  # the longest
_ACTION = "/latest/meta-data/spot/instance-action"

_PREEMPTED = "/computeMetadata/v1/instance/preempted"
_CHANGE_WITHIN_S = 30

_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_EVENTS_WITHIN_S = 150.0  # the first request turns the service on, which takes two minutes
_ENDINGS = ("Preempt", "Terminate")


@dataclass(frozen=True)
class Notice:
    """An announcement of this machine's end."""

    what: str
    """The cloud's name for it."""
    ends_at: datetime.datetime | None
    """When the machine ends; None: the cloud does not say."""


@dataclass(frozen=True)
class _Answer:
    status: int
    text: str
    etag: str | None

    def of(self, path: str) -> str:
        """The text of an answer with status 200. Raises MetadataError for another status."""
        if self.status != http.HTTPStatus.OK:
            raise MetadataError(f"{path}: status {self.status}")
        return self.text

    def parsed(self, path: str) -> Mapping[str, Any]:
        """The answer as a JSON object. Raises MetadataError."""
        try:
            found = json.loads(self.of(path))
        except ValueError as error:
            raise MetadataError(f"{path}: {error}") from error
        if not isinstance(found, dict):
            raise MetadataError(f"{path}: not a JSON object")
        return found


class Cloud(abc.ABC):
    """One machine's metadata service, at an address such as http://169.254.169.254."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        # The metadata service is never behind a proxy.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @abc.abstractmethod
    def poll(self) -> Notice | None:
        """The current notice; may wait for a change. Raises MetadataError."""

    def _ask(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        within_s: float = _ANSWER_WITHIN_S,
    ) -> _Answer:
        """Send a request; any status is an answer. Raises MetadataError if none comes."""
        request = urllib.request.Request(self._address + path, None, dict(headers), method=method)
        try:
            try:
                answer = self._opener.open(request, timeout=within_s)
            except urllib.error.HTTPError as refusal:
                answer = refusal
            with answer:
                text = answer.read(_MOST_BYTES).decode(errors="replace")
                return _Answer(answer.status, text, answer.headers.get("ETag"))
        except (OSError, http.client.HTTPException) as error:
            raise MetadataError(f"{self._address}{path}: {error}") from error


class Aws(Cloud):
    _token: str | None = None

    def poll(self) -> Notice | None:
        answer = self._ask_action()
        if answer.status == http.HTTPStatus.UNAUTHORIZED:  # the token has expired
            self._token = None
            answer = self._ask_action()
        if answer.status == http.HTTPStatus.NOT_FOUND:
            return None
        action = answer.parsed(_ACTION)
        return Notice(
            str(action.get("action")), _moment(action.get("time"), datetime.datetime.fromisoformat)
        )

    def _ask_action(self) -> _Answer:
        if self._token is None:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
            self._token = self._ask(_TOKEN, ttl, method="PUT").of(_TOKEN)
        return self._ask(_ACTION, {"X-aws-ec2-metadata-token": self._token})


class Gcp(Cloud):
    _etag: str | None = None
    """The newest answer's etag: a request waits until the answer differs from it."""

    def poll(self) -> Notice | None:
        path = _PREEMPTED
        if self._etag is not None:
            path += f"?wait_for_change=true&timeout_sec={_CHANGE_WITHIN_S}&last_etag={self._etag}"
        within_s = _CHANGE_WITHIN_S + _ANSWER_WITHIN_S
        answer = self._ask(path, {"Metadata-Flavor": "Google"}, within_s=within_s)
        text = answer.of(_PREEMPTED).strip().upper()
        if text not in ("TRUE", "FALSE"):
            raise MetadataError(f"{_PREEMPTED}: neither TRUE nor FALSE")
        self._etag = answer.etag
        return Notice("preempted", None) if text == "TRUE" else None


class Azure(Cloud):
    _name: str | None = None

    def poll(self) -> Notice | None:
        headers = {"Metadata": "true"}
        if self._name is None:
            self._name = self._ask(_NAME, headers).of(_NAME).strip()
        answer = self._ask(_EVENTS, headers, within_s=_EVENTS_WITHIN_S)
        for event in answer.parsed(_EVENTS).get("Events") or ():
            # Every machine of a scale set gets the events of all.
            machines = [str(each).lower() for each in event.get("Resources") or ()]
            kind = event.get("EventType")
            if kind in _ENDINGS and self._name.lower() in machines:
                return Notice(kind, _moment(event.get("NotBefore"), parsedate_to_datetime))
        return None


CLOUDS: Mapping[str, Callable[[str], Cloud]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}
"""Cloud name -> its class, created with the address of its metadata service."""


def _moment(text: object, read: Callable[[str], datetime.datetime]) -> datetime.datetime | None:
    """The time of a notice; None if it has none or it cannot be read."""
    if not isinstance(text, str) or not text:
        return None
    try:
        moment = read(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)


_LOOK_S = 2.0
_LEAVE_S = 5.0  # for workers to exit after they gave up their requests
_SHORTEST_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Watch, drain, and return the drain's exit status."""
    container = os.getppid()
    options = _parse(arguments)
    set_up_logging(LogSettings(), os.environ)
    outlived_s: float = options.restart_after
    notice = wait_for_notice(CLOUDS[options.cloud](options.address), outlived_s)
    timeout_s = drain_s(notice, options.timeout, options.notice, _now())
    log.info(f"this machine ends: {notice.what}, {_when(notice)}")
    limits = [f"--timeout={timeout_s:g}", f"--leave={_LEAVE_S:g}", f"--close-for={container}"]
    drain = [sys.executable, "-m", "cluster.node.pod_drain", *limits]
    status = subprocess.run(drain, check=False).returncode
    if notice.ends_at is not None and math.isfinite(outlived_s):
        while not is_outlived(notice, outlived_s, _now()):
            time.sleep(_LOOK_S)
        log.info("this machine survived: restarting its container")
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
        help="how long the machine lasts after a notice that does not say",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        required=True,
        metavar="SECONDS",
        help="how long requests may take to end, if the machine lasts as long",
    )
    parser.add_argument(
        "--restart-after",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="after the announced end: end the process that started this one",
    )
    return parser.parse_args(arguments)


def wait_for_notice(cloud: Cloud, outlived_s: float) -> Notice:
    """Wait for a notice, ignoring one whose end passed `outlived_s` ago."""
    problem = ""
    while True:
        try:
            notice = cloud.poll()
        except MetadataError as error:
            if str(error) != problem:
                problem = str(error)
                log.info(f"the metadata service does not answer, trying again: {problem}")
        else:
            if notice is not None and not is_outlived(notice, outlived_s, _now()):
                return notice
            if problem:
                log.info("the metadata service answers again")
            problem = ""
        time.sleep(_LOOK_S)


def drain_s(notice: Notice, timeout_s: float, unsaid_s: float, now: datetime.datetime) -> float:
    """Seconds that a drain may take, including its workers' exit. `unsaid_s`: how long the machine
    lasts after a notice without a time."""
    ends_at = notice.ends_at
    left_s = unsaid_s if ends_at is None else (ends_at - now).total_seconds()
    return max(_SHORTEST_S, min(timeout_s + _LEAVE_S, left_s))


def is_outlived(notice: Notice, by_s: float, now: datetime.datetime) -> bool:
    return notice.ends_at is not None and (now - notice.ends_at).total_seconds() >= by_s


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _when(notice: Notice) -> str:
    return "at an unknown time" if notice.ends_at is None else f"at {notice.ends_at.isoformat()}"


if __name__ == "__main__":
    sys.exit(main())
