"""Who may call the control service, and its port."""

from __future__ import annotations

from collections.abc import Mapping

import grpc.aio

from baton.control.calls import ControlGuard
from baton.grpc_options import Options, accepts_pings
from baton.identity.identity import Identity
from baton.identity.keys import ROLES, Role

_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # What strangers may send half of, before it is known who they are.
    ("grpc.max_receive_message_length", 1 << 20),
    ("grpc.max_concurrent_streams", 32),
    *accepts_pings(),
)
_OPERATOR: frozenset[Role] = frozenset({"operator"})
CALLERS: Mapping[str, frozenset[Role]] = {
    "Register": frozenset({"worker"}),
    "AgreeDtype": frozenset({"worker"}),
    "WatchFleet": frozenset(ROLES),
    "ReportRouter": frozenset({"router"}),
    "WatchUnits": frozenset({"router", "operator"}),
    "SetReplicas": _OPERATOR,
    "Drain": _OPERATOR,
    "SetRolePlan": _OPERATOR,
    "AddPool": _OPERATOR,
    "RemovePool": _OPERATOR,
    "ClosePods": _OPERATOR,
    "SetUnits": _OPERATOR,
}
"""The roles that may make each call."""


def control_server(identity: Identity, options: Options = _SERVER_OPTIONS) -> grpc.aio.Server:
    """A server that takes each call from its `CALLERS` alone."""
    is_off = identity.keys is None and identity.tls is None
    return grpc.aio.server(
        interceptors=[] if is_off else [ControlGuard(identity, CALLERS)], options=options
    )


def listen_at(server: grpc.aio.Server, listen: str, identity: Identity) -> int:
    """Listen, with TLS if the identity has it. Returns the port. Raises RuntimeError."""
    if identity.tls is None:
        return server.add_insecure_port(listen)
    return server.add_secure_port(listen, identity.tls.server_credentials())
