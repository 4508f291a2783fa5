"""The metrics port: Prometheus' metrics, and a page for operators.

The page shows the fleet, the KV that moves and the requests that ended last, as this router sees
them. It names tenants' request ids, so it belongs to operators' eyes: it is served at the metrics
port alone, where tokens are wanted to operators' tokens alone. One HTML file, no build step,
nothing from elsewhere; news come as server-sent events.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import prometheus_client
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from baton.config.router import RouterConfig
from baton.errors import BatonError
from baton.fleet import Role
from router.door.connections.acceptor import is_loopback, listening
from router.door.connections.credentials import Callers
from router.door.connections.sharing import Sharing
from router.door.http.server.errors import response_to
from router.door.http.server.guard import Guard
from router.door.http.server.http_server import HttpServer
from router.fleet.fleet import WorkerEntry
from router.report.tally import Buckets, Family
from router.units.router import Router
from router.units.units import Units

EVERY_S = 1.0
_MAX_LOOKERS = 256
_ROLES = {(True, True): Role.MIXED, (True, False): Role.PREFILL, (False, True): Role.DECODE}
_HTML = Path(__file__).with_name("page.html")


class OperatorPort:
    """Own the port."""

    def __init__(
        self, units: Units, config: RouterConfig, port: int, callers: Callers | None
    ) -> None:
        """`callers` None: open to all. Raises ConfigError when the port is taken."""
        self._units, self._callers, self._closing = units, callers, asyncio.Event()
        routes = [
            Route("/", self._page),
            Route("/events", self._events),
            Route("/metrics", self._metrics),
        ]
        is_asked = callers is None and is_loopback(config.metrics.host.strip("[]"))
        app = Starlette(
            routes=routes,
            middleware=[Middleware(Guard, config.http.allowed_hosts if is_asked else None)],
            exception_handlers={BatonError: _refuse},
        )
        listener = listening(config.metrics.host, port, reuse_port=False)
        sharing = Sharing(_MAX_LOOKERS, config.clients.max_unfinished_bytes)  # apart from clients
        self._server = HttpServer(app, listener, None, sharing, config.http.read_timeout_s)
        self.port = self._server.port

    async def start(self) -> None:
        self._server.start(self._units.report_fault)

    async def stop(self) -> None:
        self._closing.set()  # pages that look on would be cut off otherwise
        await self._server.stop()

    def _check(self, request: Request) -> None:
        """A browser sends a name and a password, which is the token. Raises UnauthenticatedError,
        PermissionDeniedError."""
        scheme, _, value = sent = request.headers.get("authorization", "").partition(" ")
        with contextlib.suppress(ValueError):
            if scheme.lower() == "basic":
                sent = ("Bearer", " ", base64.b64decode(value).decode().partition(":")[2])
        if self._callers is not None:
            self._callers.check_operator("".join(sent))

    async def _page(self, request: Request) -> HTMLResponse:
        self._check(request)
        return HTMLResponse(await asyncio.to_thread(_HTML.read_text, encoding="utf-8"))

    async def _metrics(self, request: Request) -> Response:
        self._check(request)
        registry = self._units.metrics.registry
        text = await asyncio.to_thread(prometheus_client.generate_latest, registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def _events(self, request: Request) -> StreamingResponse:
        self._check(request)
        headers = {"cache-control": "no-store"}
        return StreamingResponse(self._news(), media_type="text/event-stream", headers=headers)

    async def _news(self) -> AsyncIterator[str]:
        while not self._closing.is_set():
            yield f"data: {json.dumps(seen(self._units))}\n\n"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), EVERY_S)


def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, BatonError)
    response = response_to(error, {})
    response.headers["www-authenticate"] = 'Basic realm="Baton"'
    return response


def seen(units: Units) -> dict[str, Any]:
    """Return what the page shows now."""
    targets_s = units.config.metrics.ttft_target_s, units.config.metrics.itl_target_s
    return {
        "model": units.model_names[0],
        "units": [_unit(router) for router in units.routers],
        "ttft": _buckets(units.metrics.ttft),
        "itl": _buckets(units.metrics.itl),
        "diagnosis": units.snapshots.diagnosis(*targets_s),
    }


def _unit(router: Router) -> dict[str, Any]:
    fleet, recent = router.fleet, router.parts.recent
    return {
        "unit": router.model.code,
        "router": router.identity.router_id,
        "active": router.num_active,
        "queued": len(router.admission),
        "workers": [_worker(router, entry) for entry in fleet],
        "flows": [
            {"from": prefill, "to": decode, "bytes_per_s": rate}
            for (prefill, decode), rate in recent.bytes_per_s().items()
        ],
        "requests": [dataclasses.asdict(each) for each in reversed(recent.requests)],
    }


def _worker(router: Router, entry: WorkerEntry) -> dict[str, Any]:
    arrays, slot, facts = router.fleet.arrays, entry.slot, entry.facts
    return {
        "id": facts.worker_id,
        "pool": facts.pool,
        "role": _ROLES[facts.can_prefill, facts.can_decode].value,
        "state": entry.state.value if entry.connected else "disconnected",
        "kv_used": router.fleet.kv_use(entry),
        "running": int(arrays.running[slot]),
        "max_running": int(arrays.max_running[slot]),
        "queued_tokens": int(arrays.queued_tokens[slot]),
        "prefill_tokens_per_s": float(arrays.prefill_tokens_per_s[slot]),
    }


def _buckets(family: Family[Buckets]) -> list[tuple[str, int]]:
    """Return (upper bound in seconds, how many between the one before and it), of all labels."""
    children = list(family.children.values())
    if not children:
        return []
    bounds = [*map(str, children[0].bounds), "+Inf"]
    return [(bound, sum(each)) for bound, *each in zip(bounds, *(it.counts for it in children))]
