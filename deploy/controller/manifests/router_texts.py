"""Other models' text in routers' pods: of every revision that there is anything of, for requests go
to old and new ones side by side.

What a path is in one pod it is in every pod: a revision's group says where its own have their
model's files, and routers, who are told of the same paths, have them there, too.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

from deploy.api.model_source import ModelSource
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.controller.manifests.common import Object
from deploy.controller.manifests.merge import merged
from deploy.controller.manifests.model_files import FETCH, MODEL_VOLUME, fetching, model_mounts
from deploy.controller.objects import Object as Seen


def add_texts(pod: Object, spec: ServingClusterSpec, image: str, groups: Iterable[Seen]) -> Object:
    """A router's pod with what it lacks of the models that `groups`, of all revisions, have."""
    ordered = sorted(groups, key=lambda group: str(group["groupName"]))
    templates = [group["template"].get("spec", {}) for group in ordered]
    _add_claims(pod, spec.model, templates)
    sources = {model.uri: model for each in templates for model in _fetched_in(each)}
    sources.pop(spec.model.uri, None)
    more = [_fetch(spec, image, model) for _, model in sorted(sources.items())]
    return pod | {"initContainers": [*pod.get("initContainers", ()), *more]} if more else pod


def _add_claims(pod: Object, model: ModelSource, templates: Sequence[Seen]) -> None:
    (container,) = pod["containers"]
    own = {mount["mountPath"] for mount in model_mounts(model)}
    found = {path: claim for each in templates for path, claim in _claims_in(each)}
    for path, claim in sorted(found.items()):
        if path in own:
            continue
        name = f"{MODEL_VOLUME}-{hashlib.sha256(claim.encode()).hexdigest()[:8]}"
        source = {"claimName": claim, "readOnly": True}
        volume = {"name": name, "persistentVolumeClaim": source}
        if volume not in pod["volumes"]:
            pod["volumes"].append(volume)
        mount = {"name": name, "mountPath": path, "readOnly": True}
        container["volumeMounts"].append(mount)


def _claims_in(pod: Seen) -> list[tuple[str, str]]:
    """Where a pod has which claim with its model."""
    sources = [each for each in pod.get("volumes", ()) if each["name"] == MODEL_VOLUME]
    claims = [each["persistentVolumeClaim"] for each in sources if "persistentVolumeClaim" in each]
    mounts = [mount for each in pod.get("containers", ()) for mount in each.get("volumeMounts", ())]
    return [
        (mount["mountPath"], claim["claimName"])
        for claim in claims
        for mount in mounts
        if mount["name"] == MODEL_VOLUME
    ]


def _fetched_in(pod: Seen) -> list[ModelSource]:
    """What a pod has fetched from a URI."""
    found = []
    for container in pod.get("initContainers", ()):
        args = container.get("args", ())
        if container["name"] == FETCH and "--uri" in args:
            secrets = [each["secretRef"]["name"] for each in container.get("envFrom", ())
                       if "secretRef" in each]  # fmt: skip
            uri = args[args.index("--uri") + 1]
            found.append(ModelSource(uri=uri, credentials_secret_name=next(iter(secrets), None)))
    return found


def _fetch(spec: ServingClusterSpec, image: str, model: ModelSource) -> Object:
    """As the router's own model is fetched: what the template adds to that is added here."""
    (own,) = fetching(dataclasses.replace(spec, model=model), image, text_only=True)[
        "initContainers"
    ]
    added = spec.router.template.get("spec", {}).get("initContainers", ())
    theirs = [each for each in added if each.get("name") == FETCH]
    (container,) = merged([own], theirs, "initContainers")
    assert model.uri is not None
    code = hashlib.sha256(model.uri.encode()).hexdigest()[:8]
    result: Object = container | {"name": f"{FETCH}-{code}"}
    return result
