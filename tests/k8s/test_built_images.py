"""The images, built from their recipes, serve as a cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from baton.client import Client
from baton.client.events import HandedOff, Tokens
from deploy.api.generate import CHART
from deploy.controller.manifests.common import POOL_LABEL
from tests.k8s.installed import HEAD, MODEL, OPERATOR, Installed, on_pods, router_address
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.machine import REPOSITORY, Image
from tests.k8s.kubelet.objects import name_of

pytestmark = [*on_pods(3600), pytest.mark.images]

DECODE = f"{POOL_LABEL}=decode"
PODS = (OPERATOR, HEAD, f"{POOL_LABEL}=prefill", DECODE, "app.kubernetes.io/component=router")
LOOK = """
import json, os, shutil, sys
compilers = [each for each in ("cc", "c++", "gcc", "g++", "clang") if shutil.which(each)]
print(json.dumps([os.getuid(), sys.prefix, compilers, os.statvfs("/").f_flag & os.ST_RDONLY]))
"""


@pytest.fixture(scope="module")
def images() -> Iterator[dict[str, Image]]:
    try:
        urllib.request.urlopen("http://deb.debian.org/debian/", timeout=10).close()
    except OSError as error:
        pytest.skip(f"NO IMAGES BUILT HERE: no Debian mirror: {error}")
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    with tempfile.TemporaryDirectory(prefix="baton-images-") as name:
        command = [str(Path(__file__).with_name("build_images.sh")), name, sys.executable]
        subprocess.run(command, cwd=REPOSITORY, check=True)
        found: dict[str, Image] = {}
        for file in Path(name).glob("*.env"):
            environment = dict(line.split("=", 1) for line in file.read_text().split())
            found[f"baton/{file.stem}:{version}"] = Image(file.with_suffix(""), environment)
        yield found


def test_a_cluster_of_the_built_images_answers_without_a_compiler(
    installed: Installed, kubelet: Kubelet, tmp_path: Path
) -> None:
    shutil.copytree(MODEL, kubelet.claim("models") / "demo")
    installed.install(
        model={"claim": {"claimName": "models", "path": "demo"}},
        router={"replicas": 1},
        advanced={
            "router": {
                "placement": {"localPrefill": "never"},
                "timeouts": {"handoffReportSeconds": 10.0},
            }
        },
    )
    installed.wait_available()
    with Client(router_address(kubelet)) as client:
        events = list(client.generate(chat=[{"role": "user", "content": "Who is Hugo?"}]))
    text = "".join(event.text for event in events if isinstance(event, Tokens))
    assert text == "Hugo is the postman of Willowmere. He brings letters to every house."
    assert [event.kv_bytes > 0 for event in events if isinstance(event, HandedOff)] == [True]

    runs = {label: kubelet.container(name_of(kubelet.pods(label)[0])) for label in PODS}
    for label, run in runs.items():
        expected = [1000, "/opt/baton", [], int(label == OPERATOR)]
        assert json.loads(run.output_of("python", "-c", LOOK)) == expected, label
    runs[OPERATOR].output_of("python", "-m", "deploy.controller.upgrade_crds", "--help")
    health = "http://localhost:52365/api/local_raylet_healthz"  # KubeRay asks so
    assert "success" in runs[DECODE].output_of("wget", "-T2", "-qO-", health)
    for log in (tmp_path / "container-logs").glob("*/*.log"):  # what was built ahead is loaded
        assert not re.search("compiling|no native|Python posts", log.read_text(errors="replace"))
