"""A model on a web server is fetched before the pods start, once for all that share a cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.client import Client
from baton.client.events import Tokens
from tests.baton.fetch.checkpoint_server import CheckpointServer, write_certificate
from tests.k8s.addresses import router_address
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.test_serving import MODEL, Installed

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("crds", "kubelet", "kuberay"),
]


def trusting(certificate: Path) -> dict[str, object]:
    """A pod template whose init container knows the server's authority."""
    folder = {"path": str(certificate.parent), "type": "Directory"}
    fetching = {
        "name": "fetch-model",
        "env": [{"name": "SSL_CERT_FILE", "value": f"/authority/{certificate.name}"}],
        "volumeMounts": [{"name": "authority", "mountPath": "/authority", "readOnly": True}],
    }
    volume = {"name": "authority", "hostPath": folder}
    return {"spec": {"initContainers": [fetching], "volumes": [volume]}}


def test_a_model_on_a_web_server_is_fetched_once_and_answers(
    control_plane: ControlPlane, namespace: str, kubelet: Kubelet, tmp_path: Path
) -> None:
    (address,) = (
        each["address"]
        for each in control_plane.read("node/node-a")["status"]["addresses"]
        if each["type"] == "InternalIP"
    )
    (tmp_path / "authority").mkdir()
    certificate = write_certificate(tmp_path / "authority", address)
    files = {f"demo/{path.name}": path.read_bytes() for path in MODEL.iterdir()}
    template = trusting(certificate)
    with CheckpointServer(files, certificate, address) as server:
        server.cuts["demo/model.safetensors"] = [1_000_000]
        cache = {"claimName": "weights"}
        installed = Installed(control_plane, namespace, tmp_path, weightsCache=cache)
        installed.install(
            model={"uri": f"{server.address}/demo"},
            servedModelName="demo",
            router={"replicas": 1},
            ray={"headTemplate": template},
            pools={name: {"role": name, "podTemplate": template} for name in ("prefill", "decode")},
        )
        installed.wait_available()
    with Client(router_address(kubelet)) as client:
        events = list(client.generate(chat=[{"role": "user", "content": "Who is Hugo?"}]))
    text = "".join(event.text for event in events if isinstance(event, Tokens))
    assert text == "Hugo is the postman of Willowmere. He brings letters to every house."
    fetched = [asked for asked in server.asked if asked.path == "demo/model.safetensors"]
    assert [asked.start for asked in fetched] == [0, 1_000_000], "once, in two parts"
