"""Each source of a model, in the pods that read it."""

from __future__ import annotations

from typing import Any

import pytest

from baton.fleet import Role
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.manifests.cluster_yaml import cluster_config
from deploy.controller.manifests.common import WEIGHTS_FOLDER
from deploy.controller.manifests.pods import head_template, worker_template
from tests.deploy.controller.clusters import OWNER, context_of, pools_of, routers_of, spec_of

URI = "s3://bucket/models/qwen"


def pods(**spec: Any) -> dict[str, dict[str, Any]]:
    """Each kind's pod spec."""
    context = context_of(spec_of(**spec))
    pool = WorkerPoolSpec(role=Role.DECODE, cluster="main", pool="decode")
    return {
        "head": head_template(context)["spec"],
        "worker": worker_template(context, pool)["spec"],
    }


@pytest.mark.parametrize(
    "model", [{"name": "org/name"}, {"uri": URI}, {"claim": {"claimName": "weights"}}]
)
def test_a_routers_pod_has_nothing_of_the_model(model: dict[str, Any]) -> None:
    pod = routers_of(spec_of(model=model, hub=HUB))["spec"]["template"]["spec"]
    assert "initContainers" not in pod
    assert [volume["name"] for volume in pod["volumes"]] == ["config", "identity"]
    assert not {"HF_HOME", "HF_TOKEN"} & set(environment_of(pod))
    assert environment_of(pod)["HOME"] == "/tmp", "which this user may write"


def environment_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def test_a_uri_is_fetched_before_each_pod_to_where_its_processes_read_the_model() -> None:
    spec = spec_of(model={"uri": URI, "credentialsSecretName": "keys"})
    model = cluster_config(OWNER, spec, pools_of(spec)).model
    assert model.startswith(f"{WEIGHTS_FOLDER}/")
    for name, pod in pods(model={"uri": URI, "credentialsSecretName": "keys"}).items():
        (init,) = pod["initContainers"]
        assert init["command"] == ["python", "-m", "baton.fetch"]
        args = ["--uri", URI, "--folder", model]
        assert init["args"] == (args if name == "worker" else [*args, "--text-only"])
        assert init["image"] == pod["containers"][0]["image"]
        assert pod["serviceAccountName"] == "main-pods", "to which a cloud may give an identity"
        assert init["envFrom"] == [{"secretRef": {"name": "keys"}}]
        assert init["securityContext"] == pod["containers"][0]["securityContext"]
        (mount,) = init["volumeMounts"]
        assert mount in pod["containers"][0]["volumeMounts"]
        assert mount["name"] in [volume["name"] for volume in pod["volumes"]]


def test_two_uris_never_share_a_folder() -> None:
    specs = [spec_of(model={"uri": uri}) for uri in (URI, f"{URI}2")]
    first, second = (cluster_config(OWNER, spec, pools_of(spec)).model for spec in specs)
    assert first != second


HUB = {"offline": True, "endpoint": "https://hub.example.com", "tokenSecretName": "hub"}


def test_a_hubs_model_is_fetched_before_each_workers_pod_as_its_processes_would() -> None:
    made = pods(model={"name": "org/name", "revision": "v2"}, hub=HUB)
    (init,) = made["worker"]["initContainers"]
    assert init["command"] == ["python", "-m", "baton.fetch"]
    assert init["args"] == ["--name", "org/name", "--revision", "v2"]
    own = environment_of(made["worker"])
    env = {each["name"]: each.get("value", each.get("valueFrom")) for each in init["env"]}
    assert env.items() <= own.items(), "the same cache, the same hub, the same token"
    assert {"HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN"} <= set(env)
    assert all(mount in made["worker"]["containers"][0]["volumeMounts"]
               for mount in init["volumeMounts"])  # fmt: skip
    assert (
        "--revision" not in pods(model={"name": "org/name"})["worker"]["initContainers"][0]["args"]
    )


def test_an_engine_that_reads_no_weights_has_none_fetched() -> None:
    fake = {"engine": {"backend": "fake"}}
    made = pods(advanced=fake, model={"name": "o/n"})
    assert not any("initContainers" in pod for pod in made.values())
    (init,) = pods(advanced=fake, model={"uri": URI})["worker"]["initContainers"]
    assert "--text-only" in init["args"]


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ({"name": "/opt/m"}, "/opt/m"),
        ({"claim": {"claimName": "weights", "path": "m"}}, "/claims/weights/m"),
    ],
)
def test_of_other_sources_the_workers_pod_checks_that_the_model_is_there(
    model: dict[str, Any], folder: str
) -> None:
    made = pods(model=model)
    (init,) = made["worker"]["initContainers"]
    assert init["command"] == ["python", "-m", "baton.fetch"]
    assert init["args"] == ["--name", folder]
    assert "initContainers" not in made["head"]


def test_a_template_may_add_to_what_fetches() -> None:
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    template = {"spec": {"initContainers": [{"name": "fetch-model", "env": [proxy]}]}}
    made = pods(model={"uri": URI}, ray={"headTemplate": template})["head"]
    (init,) = made["initContainers"]
    assert proxy in init["env"]
    assert init["command"] == ["python", "-m", "baton.fetch"]


def test_every_pod_asks_the_hub_alike_and_without_settings_as_usual() -> None:
    for pod in pods(model={"name": "org/name"}, hub=HUB).values():
        environment = environment_of(pod)
        assert environment["HF_HUB_OFFLINE"] == "1"
        assert environment["HF_ENDPOINT"] == "https://hub.example.com"
        assert environment["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
        assert environment["HF_HOME"].startswith(WEIGHTS_FOLDER)
        assert environment["HOME"] == "/tmp", "which this user may write"
    for pod in pods(model={"name": "org/name"}).values():
        assert not {"HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN"} & set(environment_of(pod))


def test_revision_and_tokenizer_are_what_the_processes_read() -> None:
    spec = spec_of(model={"name": "org/name", "revision": "v2"}, tokenizer="org/other")
    config = cluster_config(OWNER, spec, pools_of(spec))
    assert (config.model, config.model_revision) == ("org/name", "v2")
    assert config.tokenizer == "org/other"
