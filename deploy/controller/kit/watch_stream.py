"""One watch: a list's changes, line by line, until the server ends it.

1. It begins at a resourceVersion; the server is asked to end it after `Window.watch_s`, and to send
   bookmarks. So the resourceVersion to go on from stays young where nothing changes.
2. It yields changes and bookmarks.
3. It ends: the server's time is up (StopIteration); the server says why it cannot go on (a
   StatusError, mostly 410); the connection broke or went silent (UnreachableError);
   `stop` was called (UnreachableError, too: the reader knows better).

A quiet watch and one that was cut without notice look alike. TCP keepalives do not help: a proxy
that has stopped forwarding answers them. So the server ends a watch before our patience does, and
one that is silent for longer than `watch_s + grace_s` was cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from enum import StrEnum

from urllib3 import BaseHTTPResponse
from urllib3.exceptions import HTTPError

from deploy.controller.kit.connection import Call, Connection, Timeouts
from deploy.controller.kit.errors import UnreachableError, status_error
from deploy.controller.kit.objects import Object


class WatchEventType(StrEnum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"
    """Its object holds a resourceVersion and nothing else."""


@dataclass(frozen=True)
class WatchEvent:
    type: WatchEventType
    object: Object


@dataclass(frozen=True)
class Window:
    """How long one watch lasts: a cut one is noticed within the sum."""

    watch_s: int = 20
    """Asked of the server, which takes whole seconds."""
    grace_s: float = 5.0


class WatchStream(AbstractContextManager["WatchStream"]):
    """Own one open answer. One thread iterates; any thread may `stop` it."""

    def __init__(self, connection: Connection, call: Call, timeouts: Timeouts) -> None:
        """Raises like `Connection.stream`; `timeouts.read_s`: the longest silence."""
        self._connection = connection
        self._call = call
        self._response: BaseHTTPResponse = connection.stream(call, timeouts)

    def __iter__(self) -> Iterator[WatchEvent]:
        for line in self._lines():
            yield self._event(line)

    def stop(self) -> None:
        """Wake the thread that reads. What has not arrived yet never comes."""
        with suppress(ValueError, RuntimeError, OSError):  # ended already
            self._response.shutdown()

    def __exit__(self, *_: object) -> None:
        """Close the answer. Called by the thread that iterates."""
        self._response.close()

    def _lines(self) -> Iterator[bytes]:
        rest = b""
        try:
            for piece in self._response.stream(None):
                *lines, rest = (rest + piece).split(b"\n")
                yield from lines
        except HTTPError as error:
            raise self._connection.unreachable(self._call, error) from error
        if rest:
            raise UnreachableError(f"{self._call}: ended within an event")

    def _event(self, line: bytes) -> WatchEvent:
        try:
            event = json.loads(line)
            if event["type"] == "ERROR":
                raise status_error(event["object"], str(self._call))
            return WatchEvent(WatchEventType(event["type"]), event["object"])
        except (ValueError, KeyError, TypeError) as error:
            raise UnreachableError(f"{self._call}: no event: {line[:300]!r}") from error
