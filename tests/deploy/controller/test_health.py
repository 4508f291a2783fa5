"""The operator's process: what kubelet asks it at its pod's address, what it says where it cannot
start."""

from __future__ import annotations

import socket
import urllib.request
from http import HTTPStatus

import pytest

from deploy.controller.__main__ import main, serve_health
from deploy.controller.controller import Controller, ControllerSettings
from deploy.controller.kit.objects import Key
from deploy.controller.manifests.common import Release
from tests.deploy.controller.scripted_api import kube_of, scripted


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_it_answers_at_addresses_of_either_family(host: str) -> None:
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    lease = Key("n", "baton-controller")
    with scripted(lambda exchange: exchange.answer({}, 503)) as api:
        controller = Controller(
            kube_of(api), ControllerSettings(lease, "one", Release("w", "r", "2.60.0"))
        )
        server = serve_health(controller, 0)
        try:
            url = f"http://{host}:{server.server_port}/healthz"
            with urllib.request.urlopen(url, timeout=5) as answer:
                assert answer.status == HTTPStatus.OK
        finally:
            server.shutdown()
            server.server_close()


def test_outside_of_a_pod_it_asks_for_a_kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    images = ["--worker-image", "w", "--router-image", "r", "--ray-version", "2.60.0"]
    monkeypatch.setattr("sys.argv", ["controller", *images])
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SystemExit, match=r"host/port is not set; .* name a file by --kubeconfig"):
        main()
