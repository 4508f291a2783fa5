"""A stranger to a cluster, who can reach its ports and knows its protocols and addresses.

    python -m tests.cluster.attacker CONTROL WORKER VICTIM UID [FOLDER ...]

As that user it tries everything with no key and with those of a cluster of its own, gRPC at the
worker's port, and to read the folders. `VICTIM` is a request that runs there. It prints what came
of each, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio

from baton.identity.control_calls import control_stub
from baton.identity.identity import Identity
from baton.identity.keys import Keys, Role, make_root
from baton.link.frames import Method
from baton.link.router_end import ask_once
from baton.v1 import control_pb2, worker_pb2

_WITHIN_S = 10.0
_ROOT = make_root()
CUT_SHORT = (grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)
"""Of gRPC itself, where a stream's first request meets the refusal."""
_EVIL = "{transfer: {ucx_library: /tmp/evil.so}, pools: {evil: {role: mixed}}}"
CALLS: tuple[tuple[str, Role, Any], ...] = (
    ("SetReplicas", "operator", control_pb2.SetReplicasRequest(pool="decode", replicas=0)),
    ("Drain", "operator", control_pb2.ControlServiceDrainRequest(worker_id="decode-0")),
    ("SetUnits", "operator", control_pb2.SetUnitsRequest()),
    ("AddPool", "operator", control_pb2.AddPoolRequest(pool="evil", config=_EVIL, replicas=1)),
    ("WatchFleet", "operator", control_pb2.WatchFleetRequest()),
    ("Register", "worker", control_pb2.RegisterRequest(worker={"address": "127.0.0.1:9"})),  # type: ignore[arg-type]
)
LINKS: tuple[tuple[Method, Role, type[Any]], ...] = (
    (Method.SESSION, "router", worker_pb2.SessionRequest),
    (Method.ATTACH, "router", worker_pb2.AttachRequest),
    (Method.CANCEL, "router", worker_pb2.Cancel),
    (Method.FOLLOW_KV, "router", worker_pb2.SubscribeKvRequest),
    (Method.DRAIN, "operator", worker_pb2.DrainRequest),
)


def own(role: Role) -> Identity:
    """Of a cluster of its own; it trusts whoever answers."""
    keys = Keys.of_root(_ROOT, role)
    keys.verify = lambda *_: True  # type: ignore[method-assign]
    return Identity(role, keys=keys)


async def call(channel: grpc.aio.Channel, identity: Identity, name: str, request: Any) -> str:
    async def requests() -> AsyncIterator[Any]:
        yield request

    method = getattr(control_stub(channel, identity), name)
    begun = method(requests() if name == "Register" else request, timeout=_WITHIN_S)
    try:
        await (anext(aiter(begun)) if name in ("Register", "WatchFleet") else begun)
    except grpc.aio.AioRpcError as error:
        if error.code() in CUT_SHORT:
            return await call(channel, identity, name, request)
        return f"{error.code().name}: {error.details()}"
    return "taken"


async def ask(worker: str, identity: Identity, method: Method, request: Any) -> str:
    try:
        await ask_once(worker, identity, method, request, _WITHIN_S)
    except OSError as error:
        return str(error)
    return "taken"


async def attack(control: str, worker: str, victim: str) -> dict[str, str]:
    said = {}
    async with grpc.aio.insecure_channel(control) as channel:
        for name, role, request in CALLS:
            said[f"{name} without a key"] = await call(channel, Identity(role), name, request)
            said[f"{name} with its own key"] = await call(channel, own(role), name, request)
    for method, role, kind in LINKS:
        request = kind(request_id=victim) if hasattr(kind, "request_id") else kind()
        said[f"{method.name} without a key"] = await ask(worker, Identity(role), method, request)
        said[f"{method.name} with its own key"] = await ask(worker, own(role), method, request)
    async with grpc.aio.insecure_channel(worker) as channel:
        drain = channel.unary_unary("/baton.v1.WorkerService/Drain", bytes, bytes)
        try:
            said["gRPC"] = str(await drain(b"", timeout=_WITHIN_S) and "taken")
        except grpc.aio.AioRpcError as error:
            said["gRPC"] = error.code().name
    return said


def main(control: str, worker: str, victim: str, uid: str, *folders: str) -> None:
    if uid != "0":  # with all that it imports, which others may not read
        os.setgroups([])
        os.setgid(int(uid))
        os.setuid(int(uid))
    said = asyncio.run(attack(control, worker, victim))
    for folder in folders:
        said[folder] = "PermissionError" if not os.access(folder, os.R_OK | os.X_OK) else "taken"
        assert said[folder] != "taken" or list(Path(folder).iterdir())
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
