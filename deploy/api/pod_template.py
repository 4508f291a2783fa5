"""What people write of pods as Kubernetes spells it, to be laid over the operator's own pods: what
they take of their nodes, and a PodTemplateSpec for the rest.

Refused, by the name of the field, is what would break the operator's pods, or would go unnoticed.
The API server judges values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from baton.config.ranges import sized
from baton.config.settings import unknown_key
from deploy.api.checked import FREE, Checked, Foreign
from deploy.api.naming import GROUP, camel

MERGE_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "ports": ("containerPort", "protocol"),
}
"""Keys that identify a list's members when Kubernetes merges two lists."""
MERGE_DEFAULTS = {"protocol": "TCP"}

TEMPLATE_KEYS = ("metadata", "spec")
METADATA_KEYS = ("annotations", "creationTimestamp", "finalizers", "labels", "name", "namespace")
POD_KEYS = (
    "activeDeadlineSeconds", "affinity", "automountServiceAccountToken", "containers", "dnsConfig",
    "dnsPolicy", "enableServiceLinks", "hostAliases", "hostIPC", "hostNetwork", "hostPID",
    "hostUsers", "hostname", "hostnameOverride", "imagePullSecrets", "initContainers", "nodeName",
    "nodeSelector", "os", "overhead", "preemptionPolicy", "priority", "priorityClassName",
    "readinessGates", "resourceClaims", "resources", "restartPolicy", "runtimeClassName",
    "schedulerName", "schedulingGates", "schedulingGroup", "securityContext", "serviceAccount",
    "serviceAccountName", "setHostnameAsFQDN", "shareProcessNamespace", "subdomain",
    "terminationGracePeriodSeconds", "tolerations", "topologySpreadConstraints", "volumes",
)  # fmt: skip
CONTAINER_KEYS = (
    "args", "command", "env", "envFrom", "image", "imagePullPolicy", "lifecycle", "livenessProbe",
    "name", "ports", "readinessProbe", "resizePolicy", "resources", "restartPolicy",
    "restartPolicyRules", "securityContext", "startupProbe", "stdin", "stdinOnce",
    "terminationMessagePath", "terminationMessagePolicy", "tty", "volumeDevices", "volumeMounts",
    "workingDir",
)  # fmt: skip
_COMPONENT = "app.kubernetes.io/component"
"""Policies and the operator find pods by this label and those of our own group."""
SHARED_LABELS = frozenset(
    f"app.kubernetes.io/{name}" for name in ("instance", "managed-by", "name")
)
"""Services, the routers' Deployment and KubeRay select by these, too. A template may hold them,
since people's tools write them everywhere. The operator's own values stay."""


def _keys(*known: str, members: int = 0, needed: tuple[str, ...] = ()) -> Foreign:
    """Describe an object with these keys, or a list of at most `members` such objects."""

    def check(value: Any, field: str) -> None:
        parts = (
            {f"{field}[{i}]": each for i, each in enumerate(value)} if members else {field: value}
        )
        for way, part in parts.items():
            _check_keys(part, known, way)
            if needed:
                _identity(part, needed, way)

    schema = {"type": "array", "maxItems": members, "items": dict(FREE)} if members else FREE
    return Foreign(schema, check)


RESOURCES = _keys("claims", "limits", "requests")
TOLERATIONS = _keys("effect", "key", "operator", "tolerationSeconds", "value", members=64)
AFFINITY = _keys("nodeAffinity", "podAffinity", "podAntiAffinity")
SPREAD_CONSTRAINTS = _keys(
    "labelSelector", "matchLabelKeys", "maxSkew", "minDomains", "nodeAffinityPolicy",
    "nodeTaintsPolicy", "topologyKey", "whenUnsatisfiable",
    members=16, needed=MERGE_KEYS["topologySpreadConstraints"],
)  # fmt: skip
ENV = _keys("name", "value", "valueFrom", members=256, needed=MERGE_KEYS["env"])


def check(template: Mapping[str, Any], field: str) -> None:
    """Check a template. Raises ValueError, which begins with the part of `field` that is at
    fault."""
    _check_keys(template, TEMPLATE_KEYS, field)
    if "metadata" in template:
        _check_metadata(template["metadata"], f"{field}.metadata")
    if "spec" in template:
        _check_pod(template["spec"], f"{field}.spec")


def _check_metadata(metadata: Any, field: str) -> None:
    _check_keys(metadata, METADATA_KEYS, field)
    for name in ("annotations", "labels"):
        way = f"{field}.{name}"
        values = metadata.get(name, {})
        _check_mapping(values, way)
        for key, value in values.items():
            if str(key).startswith(f"{GROUP}/") or key == _COMPONENT:
                raise ValueError(f"{way} must not hold {key}: the operator goes by its own")
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{way} must hold text, not {value!r} as {key}")


def _check_pod(pod: Any, field: str) -> None:
    _check_keys(pod, POD_KEYS, field)
    if "containers" in pod and pod["containers"] is None:
        raise ValueError(f"{field}.containers must not be null: a pod needs some")
    for way, key, member in _members(pod, field):
        if key in ("containers", "initContainers"):
            _check_keys(member, CONTAINER_KEYS, way)
            for _ in _members(member, way):
                pass  # their keys are checked


def _members(parent: Mapping[str, Any], field: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each member of the lists that are merged by keys: where it is, its list's name, itself.
    Raises ValueError for one without a key, or two under the same key. Of a variable the last one
    holds, as in a container."""
    for key, value in parent.items():
        if key not in MERGE_KEYS or value is None:
            continue
        if not isinstance(value, list | tuple):
            raise ValueError(f"{field}.{key} must be a list of mappings, not {value!r}")
        seen: dict[tuple[str | int, ...], Any] = {}
        for i, member in enumerate(value):
            way = f"{field}.{key}[{i}]"
            identity = _identity(member, MERGE_KEYS[key], way)
            if key != "env" and seen.setdefault(identity, member) != member:
                raise ValueError(f"{way} is there twice")
            yield way, key, member


def _identity(member: Any, keys: tuple[str, ...], field: str) -> tuple[str | int, ...]:
    _check_mapping(member, field)
    found = []
    for name in keys:
        value = member.get(name, MERGE_DEFAULTS.get(name))
        if not value or not isinstance(value, str | int):
            raise ValueError(f"{field}.{name} is needed")
        found.append(value)
    return tuple(found)


def _check_keys(value: Any, known: tuple[str, ...], field: str) -> None:
    _check_mapping(value, field)
    for name in value:
        if name not in known:
            raise ValueError(f"{field}.{name} {unknown_key(str(name), known)}")


def _check_mapping(value: Any, field: str) -> None:
    if not isinstance(value, Mapping):
        given = "null" if value is None else repr(value)
        raise ValueError(f"{field} must be a mapping, not {given}")


POD_TEMPLATE = Foreign(FREE, check)


_OF_POD = (
    *("node_selector", "tolerations", "affinity"),
    *("topology_spread_constraints", "priority_class_name"),
)
_OF_CONTAINER = ("resources", "env")


@dataclass(frozen=True, kw_only=True)
class PodSettings(Checked):
    """Settings of a pod. Each is laid over the operator's own; `podTemplate` comes last."""

    resources: Annotated[Mapping[str, Any], RESOURCES] = field(default_factory=dict)
    """Requests and limits of the container. GPUs follow from `parallelism` unless they are given
    here; 0 takes a device away."""
    guaranteed: bool = False
    """Whether limits equal the requests (QoS Guaranteed). Containers that `podTemplate` adds need
    requests of their own."""
    node_selector: Annotated[Mapping[str, str], sized(64)] = field(default_factory=dict)
    """Labels that the pod's node must have."""
    tolerations: Annotated[tuple[Any, ...], TOLERATIONS] = ()
    """Taints that the pod's node may have."""
    affinity: Annotated[Mapping[str, Any], AFFINITY] = field(default_factory=dict)
    """Which nodes and pods the pod is to be near to, or far from."""
    topology_spread_constraints: Annotated[tuple[Any, ...], SPREAD_CONSTRAINTS] = ()
    """How pods spread over zones or nodes. By default: over nodes, where there is room."""
    priority_class_name: Annotated[str, sized(253)] | None = None
    """The PriorityClass: which pods give way when nodes are full."""
    env: Annotated[tuple[Any, ...], ENV] = ()
    """Environment variables of the container."""
    pod_template: Annotated[Mapping[str, Any], POD_TEMPLATE] = field(default_factory=dict)
    """A PodTemplateSpec that is merged over all other settings: annotations, volumes, containers.
    The operator keeps the labels that it finds pods by (baton.dev, app.kubernetes.io)."""

    def own_template(self, container: str) -> dict[str, Any]:
        """Return the fields before `pod_template` as a PodTemplateSpec, for that container."""
        spec, of_container = (
            {camel(name): _plain(getattr(self, name)) for name in names if getattr(self, name)}
            for names in (_OF_POD, _OF_CONTAINER)
        )
        if of_container:
            spec["containers"] = [{"name": container, **of_container}]
        return {"spec": spec} if spec else {}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
