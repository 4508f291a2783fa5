"""python -m deploy.controller: the operator."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import get_args

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from baton.config.cluster import LogFormat, LogLevel
from baton.process.log import LogSettings, set_up_logging
from deploy.controller.controller import Controller, ControllerSettings
from deploy.controller.kit.connection import command_connection
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key
from deploy.controller.manifests.common import PodMonitors, Release

FIELD_MANAGER = "baton-controller"


def _label(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text}: NAME=VALUE")
    return name, value


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deploy.controller", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help="else: the pod's account")
    parser.add_argument("--namespace", metavar="NAME", help="look after this one alone; else: all")
    parser.add_argument(
        "--lease-namespace",
        metavar="NAME",
        default=os.environ.get("POD_NAMESPACE", "default"),
        help="where the Lease lies that one operator holds",
    )
    parser.add_argument("--worker-image", required=True, metavar="IMAGE")
    parser.add_argument("--router-image", required=True, metavar="IMAGE")
    parser.add_argument("--ray-version", required=True, metavar="VERSION")
    parser.add_argument("--pod-monitor-interval", metavar="TIME", help="make PodMonitors, too")
    parser.add_argument(
        "--pod-monitor-label", action="append", default=[], metavar="NAME=VALUE", type=_label
    )
    parser.add_argument("--health-port", type=int, default=8081, metavar="PORT")
    parser.add_argument("--log-level", choices=get_args(LogLevel), default="info")
    parser.add_argument("--log-format", choices=get_args(LogFormat), default="text")
    return parser.parse_args()


class _HealthServer(ThreadingHTTPServer):
    """Listens at IPv6 addresses, too, where the machine has them: kubelet asks at the pod's."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def serve_health(controller: Controller, port: int) -> ThreadingHTTPServer:
    """Serve /healthz while the process lives, /readyz once its caches are complete, /metrics."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._send_metrics()
                return
            is_well = self.path == "/healthz" or (self.path == "/readyz" and controller.is_ready())
            self.send_response(HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE)
            self.end_headers()

        def _send_metrics(self) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.end_headers()
            self.wfile.write(generate_latest(controller.metrics.registry))

        def log_message(self, format: str, *args: object) -> None:
            """Probes are no news."""

    server = _HealthServer(("", port), Handler)
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server


def main() -> None:
    options = _arguments()
    set_up_logging(LogSettings(options.log_level, options.log_format), {})
    connection = command_connection(options.kubeconfig)
    interval = options.pod_monitor_interval
    release = Release(
        options.worker_image,
        options.router_image,
        options.ray_version,
        os.environ.get("POD_NAMESPACE"),
        PodMonitors(interval, dict(options.pod_monitor_label)) if interval else None,
    )
    settings = ControllerSettings(
        lease=Key(options.lease_namespace, "baton-controller"),
        identity=f"{os.environ.get('POD_NAME') or socket.gethostname()}-{os.getpid()}",
        release=release,
        namespace=options.namespace,
    )
    controller = Controller(Kube(connection, FIELD_MANAGER), settings)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    controller.start()
    health = serve_health(controller, options.health_port)
    stopping.wait()
    controller.stop()
    health.shutdown()


if __name__ == "__main__":
    main()
