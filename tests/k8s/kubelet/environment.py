"""Pure: a container's environment, command and user, as its pod says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.k8s.kubelet.entry import User
from tests.k8s.kubelet.errors import ContainerError

_REFERENCE = re.compile(r"\$(\$)?\(([A-Za-z_][\w.-]*)\)")
_LABELLED = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")

Values = Callable[[str, str], Mapping[str, str] | None]
"""A ConfigMap's or Secret's text by kind and name; None: there is no such object."""


@dataclass(frozen=True)
class PodFacts:
    """What a kubelet knows of a pod before the API server does."""

    pod: Mapping[str, Any]
    address: str
    host_address: str

    def field(self, path: str) -> str:
        """What `fieldRef` and the downward API name. Raises ContainerError."""
        metadata, spec = self.pod["metadata"], self.pod["spec"]
        if (found := _LABELLED.fullmatch(path)) is not None:
            return str((metadata.get(found[1]) or {}).get(found[2], ""))
        fields = {
            "metadata.name": metadata["name"],
            "metadata.namespace": metadata["namespace"],
            "metadata.uid": metadata["uid"],
            "spec.nodeName": spec["nodeName"],
            "spec.serviceAccountName": spec.get("serviceAccountName", ""),
            "status.podIP": self.address,
            "status.hostIP": self.host_address,
        }
        if path not in fields:
            raise ContainerError(f"fieldRef {path}: this kubelet does not know it")
        return str(fields[path])


def environment_of(
    container: Mapping[str, Any], facts: PodFacts, values: Values, base: Mapping[str, str]
) -> dict[str, str]:
    """`base` is what there is without the pod saying anything. Raises ContainerError."""
    result = {**base, "HOSTNAME": facts.field("metadata.name")}
    for source in container.get("envFrom") or ():
        result |= _required(values, "Secret", source["secretRef"])
    for each in container.get("env") or ():
        if each.get("valueFrom"):
            value = _referred(each["valueFrom"], facts, values)
            if value is not None:
                result[each["name"]] = value
        else:
            result[each["name"]] = expanded(each.get("value") or "", result)
    return result


def command_of(container: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Raises ContainerError: there is no image that would say what to run."""
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    if not container.get("command"):
        raise ContainerError(f"container {container['name']} has no command")
    return tuple(expanded(word, environment) for word in words)


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """`$(NAME)` by its value; one that nobody knows, and `$$(NAME)`, stay."""

    def value(found: re.Match[str]) -> str:
        if found[1]:
            return f"$({found[2]})"
        return environment.get(found[2], found[0])

    return _REFERENCE.sub(value, text)


def user_of(pod: Mapping[str, Any], container: Mapping[str, Any]) -> User:
    """Raises ContainerError where root is asked for and forbidden."""
    of_pod = pod["spec"].get("securityContext") or {}
    context = {**of_pod, **(container.get("securityContext") or {})}
    uid = int(context.get("runAsUser") or 0)
    if context.get("runAsNonRoot") and uid == 0:
        raise ContainerError(f"container {container['name']} has runAsNonRoot and would be root")
    group = of_pod.get("fsGroup")
    groups = () if group is None else (group,)
    return User(uid, int(context.get("runAsGroup") or 0), groups)


def selected(items: Sequence[Mapping[str, Any]] | None, texts: Mapping[str, str]) -> dict[str, str]:
    """A volume's files: those that `items` names, all where it is None."""
    if items is None:
        return dict(texts)
    return {item["path"]: texts[item["key"]] for item in items if item["key"] in texts}


def _referred(source: Mapping[str, Any], facts: PodFacts, values: Values) -> str | None:
    if reference := source.get("fieldRef"):
        return facts.field(reference["fieldPath"])
    for name, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
        if reference := source.get(name):
            texts = _required(values, kind, reference)
            if reference["key"] not in texts and not reference.get("optional"):
                raise ContainerError(f"{kind} {reference['name']} has no {reference['key']}")
            return texts.get(reference["key"])
    raise ContainerError(f"valueFrom {source}: this kubelet does not know it")


def _required(values: Values, kind: str, reference: Mapping[str, Any]) -> Mapping[str, str]:
    texts = values(kind, reference["name"])
    if texts is None:
        if reference.get("optional"):
            return {}
        raise ContainerError(f"there is no {kind} {reference['name']}")
    return texts
