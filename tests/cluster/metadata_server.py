"""The metadata services of three clouds, as far as they tell of a machine's end: real HTTP, with
the headers that each wants and the answers that its documents show."""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
import threading
from collections.abc import Iterator
from email.utils import format_datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

OWN_NAME = "aks-gpu-31215_7"
Reply = tuple[HTTPStatus, str, dict[str, str]]
_LOOPBACK = "127.0.0.1"


class MetadataServer:
    """The metadata service as one machine sees it, at `address`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked: list[str] = []
        """Paths, with their queries."""
        self.is_away = False
        """It answers with an error then."""
        self._changed = threading.Condition()
        self._is_over = False
        self._tokens: set[str] = set()
        self._action: dict[str, str] | None = None
        self._is_preempted = False
        self._events: list[dict[str, object]] = []

    def until_asked(self, num_times: int) -> None:
        """Since it serves."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.asked) >= num_times, 30), self.asked

    # --- what befalls the machine ---------------------------------------------------------------

    def call_back(self, cloud: str, in_s: float) -> None:
        """Its end is announced, so many seconds ahead where the cloud says when."""
        ends_at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=in_s)
        with self._changed:
            if cloud == "aws":
                moment = ends_at.strftime("%Y-%m-%dT%H:%M:%SZ")
                self._action = {"action": "terminate", "time": moment}
            elif cloud == "gcp":
                self._is_preempted = True
            else:
                self.announce("Preempt", OWN_NAME, format_datetime(ends_at, usegmt=True))
            self._changed.notify_all()

    def announce(self, kind: str, machine: str, not_before: str) -> None:
        """An event of Azure's; no time once it has begun."""
        event = {
            "EventId": secrets.token_hex(8),
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": [machine],
            "EventStatus": "Scheduled" if not_before else "Started",
            "NotBefore": not_before,
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        self._events.append(event)

    def forget_tokens(self) -> None:
        """Those that were given have run out."""
        self._tokens.clear()

    def end(self) -> None:
        """Whoever waits for a change is answered."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    # --- answers --------------------------------------------------------------------------------

    def reply(self, method: str, target: str, headers: dict[str, str]) -> Reply:
        with self._changed:
            self.asked.append(target)
            self._changed.notify_all()
        if self.is_away:
            return HTTPStatus.SERVICE_UNAVAILABLE, "", {}
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path.startswith("/computeMetadata/"):
            return self._gcp(parts.path, query, headers)
        if parts.path.startswith("/metadata/"):
            return self._azure(parts.path, query, headers)
        return self._aws(method, parts.path, headers)

    def _aws(self, method: str, path: str, headers: dict[str, str]) -> Reply:
        if path == "/latest/api/token":
            lives_s = int(headers.get("x-aws-ec2-metadata-token-ttl-seconds", 0))
            if method != "PUT" or not 1 <= lives_s <= 21_600:
                return HTTPStatus.BAD_REQUEST, "", {}
            self._tokens.add(token := secrets.token_urlsafe(24))
            return HTTPStatus.OK, token, {}
        if headers.get("x-aws-ec2-metadata-token") not in self._tokens:
            return HTTPStatus.UNAUTHORIZED, "", {}
        if path == "/latest/meta-data/events/recommendations/rebalance":
            return HTTPStatus.OK, json.dumps({"noticeTime": "2026-11-22T08:22:00Z"}), {}
        if path != "/latest/meta-data/spot/instance-action" or self._action is None:
            return HTTPStatus.NOT_FOUND, "", {}
        return HTTPStatus.OK, json.dumps(self._action), {}

    def _gcp(self, path: str, query: dict[str, str], headers: dict[str, str]) -> Reply:
        if headers.get("metadata-flavor") != "Google":
            return HTTPStatus.FORBIDDEN, "", {}
        if path != "/computeMetadata/v1/instance/preempted":
            return HTTPStatus.NOT_FOUND, "", {}
        before, waits = query.get("last_etag", ""), query.get("wait_for_change") == "true"
        with self._changed:
            if waits:
                limit_s = float(query.get("timeout_sec", 60))
                self._changed.wait_for(lambda: self._is_over or self._etag != before, limit_s)
            return HTTPStatus.OK, str(self._is_preempted).upper(), {"ETag": self._etag}

    @property
    def _etag(self) -> str:
        return f"{int(self._is_preempted):016x}"

    def _azure(self, path: str, query: dict[str, str], headers: dict[str, str]) -> Reply:
        if headers.get("metadata") != "true" or "api-version" not in query:
            return HTTPStatus.BAD_REQUEST, "", {}
        if path == "/metadata/instance/compute/name" and query.get("format") == "text":
            return HTTPStatus.OK, OWN_NAME, {}
        if path != "/metadata/scheduledevents":
            return HTTPStatus.NOT_FOUND, "", {}
        reported = {"DocumentIncarnation": len(self._events), "Events": self._events}
        return HTTPStatus.OK, json.dumps(reported), {}


class Machines:
    """Own every machine's answers. All ask one service at `address`, and each is known by its own
    address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._served: dict[str, MetadataServer] = {}

    def of(self, ip: str) -> MetadataServer:
        with self._lock:
            return self._served.setdefault(ip, MetadataServer(self.address))

    def end(self) -> None:
        with self._lock:
            for machine in self._served.values():
                machine.end()


@contextlib.contextmanager
def serving_metadata() -> Iterator[MetadataServer]:
    """Of this machine alone."""
    with serving_machines(_LOOPBACK) as machines:
        yield machines.of(_LOOPBACK)


@contextlib.contextmanager
def serving_machines(host: str) -> Iterator[Machines]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            machine = served.of(str(self.client_address[0]))
            status, text, own = machine.reply(self.command, self.path, headers)
            self.send_response(status)
            for name, value in own.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer((host, 0), Handler)
    served = Machines(f"http://{host}:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="metadata")
    thread.start()
    try:
        yield served
    finally:
        served.end()
        server.shutdown()
        thread.join()
        server.server_close()
