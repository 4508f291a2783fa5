"""A model on a hub, or on a web server, is fetched before its workers' pods start, once for all
that share a cache."""

from __future__ import annotations

from pathlib import Path

from baton.client import Client
from baton.client.events import Tokens
from tests.baton.fetch.checkpoint_server import CheckpointServer, write_certificate
from tests.baton.small_hub import SmallHub
from tests.k8s.installed import MODEL, Installed, on_pods, router_address
from tests.k8s.kubelet.kubelet import Kubelet

pytestmark = on_pods(600)


def check_answers(kubelet: Kubelet) -> None:
    with Client(router_address(kubelet)) as client:
        events = list(client.generate(chat=[{"role": "user", "content": "Who is Hugo?"}]))
    text = "".join(event.text for event in events if isinstance(event, Tokens))
    assert text == "Hugo is the postman of Willowmere. He brings letters to every house."


def test_a_hubs_model_is_fetched_once_by_init_containers_and_answers(
    installed: Installed, kubelet: Kubelet
) -> None:
    files = {path.name: path.read_bytes() for path in MODEL.iterdir()}
    installed.nodes["weightsCache"] = {"claimName": "weights"}
    with SmallHub("baton-test/demo", files, revision="v2", host=kubelet.host_address) as hub:
        installed.install(
            model={"name": "baton-test/demo", "revision": "v2"},
            hub={"endpoint": hub.address},
            router={"replicas": 1},
        )
        installed.wait_available()
        assert hub.sent().count("model.safetensors") == 1
    for pod in kubelet.pods("app.kubernetes.io/component=worker"):
        ended = {each["name"]: each["state"] for each in pod["status"]["initContainerStatuses"]}
        assert ended["fetch-model"]["terminated"]["exitCode"] == 0
    check_answers(kubelet)


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
    installed: Installed, kubelet: Kubelet, tmp_path: Path
) -> None:
    (tmp_path / "authority").mkdir()
    certificate = write_certificate(tmp_path / "authority", kubelet.host_address)
    files = {f"demo/{path.name}": path.read_bytes() for path in MODEL.iterdir()}
    template = trusting(certificate)
    installed.nodes["weightsCache"] = {"claimName": "weights"}
    with CheckpointServer(files, certificate, kubelet.host_address) as server:
        server.cuts["demo/model.safetensors"] = [1_000_000]
        installed.install(
            model={"uri": f"{server.address}/demo"},
            servedModelName="demo",
            router={"replicas": 1},
            ray={"headTemplate": template},
            pools={name: {"role": name, "podTemplate": template} for name in ("prefill", "decode")},
        )
        installed.wait_available()
    check_answers(kubelet)
    fetched = [asked for asked in server.asked if asked.path == "demo/model.safetensors"]
    assert [asked.start for asked in fetched] == [0, 1_000_000], "once, in two parts"
