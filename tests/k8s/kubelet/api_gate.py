"""The way from pods to the API server, which listens on this machine's loopback: each pod has it on
its own. The server's certificate is one of 127.0.0.1, so that clients trust it there, too."""

from __future__ import annotations

import os
import socket
import threading

from tests.k8s.kubelet.kernel import Namespace, enter
from tests.k8s.tcp_proxy import TcpProxy

_HOST, _PORT = "127.0.0.1", 443
ENVIRONMENT = {"KUBERNETES_SERVICE_HOST": _HOST, "KUBERNETES_SERVICE_PORT": str(_PORT)}
"""By which a pod finds it."""


def open_gate_in(pid: int, proxy: TcpProxy) -> None:
    """In the network of a process; it is there on return."""
    made: list[socket.socket] = []

    def listen() -> None:
        """A thread is in one network for good, a socket in that of the thread that made it."""
        descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            enter(descriptor, Namespace.NETWORK)
        finally:
            os.close(descriptor)
        made.append(socket.create_server((_HOST, _PORT)))

    thread = threading.Thread(target=listen, name="api-gate-listen")
    thread.start()
    thread.join()
    proxy.listen(made[0])
