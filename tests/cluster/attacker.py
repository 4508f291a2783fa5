"""A stranger to a cluster, who can reach its ports and knows its protocols and addresses.

    python -m tests.cluster.attacker CONTROL WORKER VICTIM UID [FOLDER ...]

As that user it makes every call with no key and with those of a cluster of its own, and tries to
read the folders. `VICTIM` is a request that runs there. It prints what came of each, as JSON.
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

from baton.control.calls import control_channel, control_stub
from baton.grpc_options import DIRECT
from baton.identity.identity import Identity
from baton.identity.keys import Keys, Role, make_root
from baton.link.frames import CALLERS as LINK_CALLERS
from baton.link.frames import MESSAGES
from baton.link.router_end import ask_once
from baton.v1 import control_pb2
from cluster.registry.control_access import CALLERS

_ROOT = make_root()
SERVICE = control_pb2.DESCRIPTOR.services_by_name["ControlService"]
_CUT_SHORT = (grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)
"""Of gRPC itself, where a stream's first request meets the refusal."""
_REFUSED = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAVAILABLE,
)


def own(role: Role) -> Identity:
    """Of a cluster of its own; it trusts whoever answers."""
    keys = Keys.of_root(_ROOT, role)
    keys.verify = lambda *_: True  # type: ignore[method-assign]
    return Identity(role, keys=keys)


async def refusal(control: str, identity: Identity, name: str) -> str:
    """Why the control service refuses a call as one of somebody else; empty: it is taken."""
    method = SERVICE.methods_by_name[name]
    request = getattr(control_pb2, method.input_type.name)()

    async def requests() -> AsyncIterator[Any]:
        yield request

    options = (("grpc.use_local_subchannel_pool", 1), *DIRECT)
    async with control_channel(grpc.aio, control, options, identity) as channel:
        make = getattr(control_stub(channel, identity), name)
        call = make(requests() if method.client_streaming else request, timeout=10)
        try:
            await (anext(aiter(call)) if method.server_streaming else call)
        except grpc.aio.AioRpcError as error:
            if error.code() in _CUT_SHORT:
                return await refusal(control, identity, name)
            said = f"{error.code().name}: {error.details()}"
            return said if error.code() in _REFUSED else ""
        finally:
            call.cancel()
    return ""


async def attack(control: str, worker: str, victim: str) -> dict[str, str]:
    said = {}
    for how, of in (("without a key", Identity), ("with its own key", own)):
        for name, callers in CALLERS.items():
            said[f"{name} {how}"] = await refusal(control, of(min(callers)), name) or "taken"
        for method, callers in LINK_CALLERS.items():
            request: Any = MESSAGES[method][0]()
            if hasattr(request, "request_id"):
                request.request_id = victim
            try:
                await ask_once(worker, of(min(callers)), method, request, 10.0)
                said[f"{method.name} {how}"] = "taken"
            except OSError as error:
                said[f"{method.name} {how}"] = str(error)
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
