"""Routers' pods while workers of several models serve: each model's text is where they read it."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.manifests.cluster_yaml import cluster_config
from deploy.controller.manifests.pods import PodContext, worker_template
from deploy.controller.manifests.routers import router_deployment
from tests.deploy.controller.test_manifests import OWNER, RELEASE, pools_of, spec_of

OLD = {"claim": {"claimName": "old", "path": "qwen"}}
NEW = {"claim": {"claimName": "new", "path": "qwen"}}
OLD_URI = {"uri": "s3://bucket/old", "credentialsSecretName": "old-keys"}
NEW_URI = {"uri": "s3://bucket/new"}


def context_of(model: dict[str, Any], **spec: Any) -> PodContext:
    return PodContext(OWNER, spec_of(model=model, **spec), RELEASE, "v1", "r1")


def group_of(model: dict[str, Any], name: str = "decode-old", **template: Any) -> dict[str, Any]:
    pool = WorkerPoolSpec(role="decode", cluster="main", pool="decode", template=template)
    return {"groupName": name, "template": worker_template(context_of(model), name, pool)}


def router_pod(model: dict[str, Any], *groups: dict[str, Any], **router: Any) -> dict[str, Any]:
    made = router_deployment(context_of(model, router=router), groups)
    pod: dict[str, Any] = made["spec"]["template"]["spec"]
    return pod


def claims(pod: dict[str, Any]) -> dict[str, str]:
    """By where the router has them."""
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert len(volumes) == len(pod["volumes"])
    (container,) = pod["containers"]
    named = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    return {
        path: volume["persistentVolumeClaim"]["claimName"]
        for path, volume in named.items()
        if "persistentVolumeClaim" in volume
    }


def model_path(model: dict[str, Any], **spec: Any) -> str:
    made = spec_of(model=model, **spec)
    return cluster_config(OWNER, made, pools_of(made)).model


def test_each_model_s_claim_is_where_its_own_workers_have_it() -> None:
    pod = router_pod(NEW, group_of(OLD), group_of(NEW, "decode-new"))
    assert claims(pod) == {"/claims/new": "new", "/claims/old": "old"}
    assert (model_path(OLD), model_path(NEW)) == ("/claims/old/qwen", "/claims/new/qwen")
    assert all(
        mount.get("readOnly")
        for mount in pod["containers"][0]["volumeMounts"]
        if mount["mountPath"].startswith("/claims/")
    )


def test_revisions_of_one_source_change_nothing_of_the_routers() -> None:
    alone = router_pod(NEW)
    assert router_pod(NEW, group_of(NEW), group_of(NEW, "decode-new")) == alone
    assert router_pod(NEW_URI, group_of(NEW_URI)) == router_pod(NEW_URI)
    other_folder = {"claim": {"claimName": "new", "path": "llama"}}
    assert router_pod(NEW, group_of(other_folder)) == alone


def test_a_claim_that_a_former_release_gave_its_workers_stays_where_it_was() -> None:
    group = group_of(OLD)
    for mount in group["template"]["spec"]["containers"][0]["volumeMounts"]:
        if mount["name"] == "model":
            mount["mountPath"] = "/models"
    assert claims(router_pod(NEW, group)) == {"/claims/new": "new", "/models": "old"}
    assert claims(router_pod(OLD, group)) == {"/claims/old": "old", "/models": "old"}


def test_each_model_s_text_is_fetched_with_its_own_keys() -> None:
    own, other = router_pod(NEW_URI, group_of(OLD_URI), group_of(OLD_URI, "x"))["initContainers"]
    assert own["name"] == "fetch-model"
    assert "envFrom" not in own
    assert other["name"].startswith("fetch-model-")
    assert other["envFrom"] == [{"secretRef": {"name": "old-keys"}}]
    folder = model_path(OLD_URI)
    args = ["--uri", "s3://bucket/old", "--folder", folder, "--text-only"]
    assert other["args"] == args
    assert other["image"] == own["image"] == RELEASE.router_image


def test_what_a_template_adds_to_the_fetching_is_added_for_each_model() -> None:
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    template = {"spec": {"initContainers": [{"name": "fetch-model", "env": [proxy]}]}}
    made = router_pod(NEW_URI, group_of(OLD_URI), template=template)
    assert [proxy in each["env"] for each in made["initContainers"]] == [True, True]


def test_a_source_of_another_kind_leaves_the_router_s_own_as_it_is() -> None:
    pod = router_pod({"name": "org/name"}, group_of(OLD), group_of(OLD_URI, "decode-uri"))
    assert claims(pod) == {"/claims/old": "old"}
    (other,) = pod["initContainers"]
    assert "s3://bucket/old" in other["args"]


@pytest.mark.parametrize(
    ("named", "read"),
    [
        ("/models/texts", "/claims/new/texts"),
        ("/models", "/claims/new"),
        ("/modelsets/texts", "/modelsets/texts"),
        ("/claims/new/texts", "/claims/new/texts"),
        ("org/name", "org/name"),
        (None, None),
    ],
)
def test_a_tokenizer_on_the_claim_is_found_by_its_former_name_too(
    named: str | None, read: str | None
) -> None:
    spec = spec_of(model=NEW, **({} if named is None else {"tokenizer": named}))
    assert cluster_config(OWNER, spec, pools_of(spec)).tokenizer == read


def test_a_folder_of_the_image_is_what_it_says() -> None:
    spec = spec_of(model={"name": "/models/qwen"}, tokenizer="/models/texts")
    config = cluster_config(OWNER, spec, pools_of(spec))
    assert (config.model, config.tokenizer) == ("/models/qwen", "/models/texts")
