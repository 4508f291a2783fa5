"""What a cloud's metadata service says of the end of the machine that asks it: spot capacity that
is called back.

| cloud | what is asked | what is a notice |
| --- | --- | --- |
| aws | `spot/instance-action`, with a token of IMDSv2 | any but 404, with its time |
| gcp | `instance/preempted`, which answers once it changes | `TRUE`, without a time |
| azure | `scheduledevents` | Preempt or Terminate of this machine, with a time until it begins |

AWS's rebalance recommendation is none: nothing ends yet. Paths and answers are as in the clouds'
own documents.
"""

from __future__ import annotations

import datetime
import email.utils
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.errors import MetadataError

_ANSWER_WITHIN_S = 5.0
_MOST_BYTES = 1 << 20

_TOKEN = "/latest/api/token"
_TOKEN_TTL_S = 21_600  # the longest
_ACTION = "/latest/meta-data/spot/instance-action"

_PREEMPTED = "/computeMetadata/v1/instance/preempted"
_CHANGE_WITHIN_S = 30

_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_EVENTS_WITHIN_S = 150.0  # the first question turns the service on, for two minutes
_ENDINGS = ("Preempt", "Terminate")


@dataclass(frozen=True)
class Notice:
    """This machine's end is announced."""

    what: str
    """In the cloud's word."""
    ends_at: datetime.datetime | None
    """None: it does not say."""


class Cloud(Protocol):
    """One machine's metadata service, at an address such as http://169.254.169.254."""

    def look(self) -> Notice | None:
        """What is announced now; may wait for it for a while. Raises MetadataError."""


@dataclass(frozen=True)
class _Answer:
    status: int
    text: str
    etag: str | None

    def of(self, path: str) -> str:
        """Raises MetadataError for what is no answer to the question."""
        if self.status != http.HTTPStatus.OK:
            raise MetadataError(f"{path}: status {self.status}")
        return self.text

    def parsed(self, path: str) -> Mapping[str, Any]:
        """Raises MetadataError."""
        try:
            found = json.loads(self.of(path))
        except ValueError as error:
            raise MetadataError(f"{path}: {error}") from error
        if not isinstance(found, dict):
            raise MetadataError(f"{path}: no object")
        return found


class _Service:
    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        # No proxy stands between a machine and its own metadata.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        within_s: float = _ANSWER_WITHIN_S,
    ) -> _Answer:
        """Raises MetadataError where none comes; any status is an answer."""
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


class Aws:
    def __init__(self, address: str) -> None:
        self._service = _Service(address)
        self._token: str | None = None

    def look(self) -> Notice | None:
        answer = self._ask()
        if answer.status == http.HTTPStatus.UNAUTHORIZED:  # the token has run out
            self._token = None
            answer = self._ask()
        if answer.status == http.HTTPStatus.NOT_FOUND:
            return None
        told = answer.parsed(_ACTION)
        return Notice(str(told.get("action")), _moment(told.get("time"), _of_iso))

    def _ask(self) -> _Answer:
        if self._token is None:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
            self._token = self._service.ask(_TOKEN, ttl, method="PUT").of(_TOKEN)
        return self._service.ask(_ACTION, {"X-aws-ec2-metadata-token": self._token})


class Gcp:
    def __init__(self, address: str) -> None:
        self._service = _Service(address)
        self._etag: str | None = None
        """Of the newest answer: one that is another comes at once."""

    def look(self) -> Notice | None:
        path = _PREEMPTED
        if self._etag is not None:
            path += f"?wait_for_change=true&timeout_sec={_CHANGE_WITHIN_S}&last_etag={self._etag}"
        within_s = _CHANGE_WITHIN_S + _ANSWER_WITHIN_S
        answer = self._service.ask(path, {"Metadata-Flavor": "Google"}, within_s=within_s)
        told = answer.of(_PREEMPTED).strip().upper()
        if told not in ("TRUE", "FALSE"):
            raise MetadataError(f"{_PREEMPTED}: neither TRUE nor FALSE")
        self._etag = answer.etag
        return Notice("preempted", None) if told == "TRUE" else None


class Azure:
    def __init__(self, address: str) -> None:
        self._service = _Service(address)
        self._name: str | None = None

    def look(self) -> Notice | None:
        headers = {"Metadata": "true"}
        if self._name is None:
            self._name = self._service.ask(_NAME, headers).of(_NAME).strip()
        answer = self._service.ask(_EVENTS, headers, within_s=_EVENTS_WITHIN_S)
        for event in answer.parsed(_EVENTS).get("Events") or ():
            # All machines of a scale set hear of each one's.
            machines = [str(each).lower() for each in event.get("Resources") or ()]
            kind = event.get("EventType")
            if kind in _ENDINGS and self._name.lower() in machines:
                return Notice(kind, _moment(event.get("NotBefore"), _of_mail))
        return None


CLOUDS: Mapping[str, Callable[[str], Cloud]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}
"""By name, each made with its service's address."""


def _of_iso(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


def _of_mail(text: str) -> datetime.datetime:
    return email.utils.parsedate_to_datetime(text)


def _moment(text: object, read: Callable[[str], datetime.datetime]) -> datetime.datetime | None:
    """A notice whose time cannot be read is one all the same."""
    if not isinstance(text, str) or not text:
        return None
    try:
        moment = read(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)
