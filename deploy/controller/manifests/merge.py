"""A user's PodTemplateSpec over the operator's own, as `kubectl apply` merges: mappings key by key,
lists of named things by their keys, all else replaced. A volume has one source: where the user
names a volume, only the user's keys stay (Kubernetes' `retainKeys`). A variable has one value and
is the user's whole: beside `valueFrom` no `value` is allowed.

Null takes a key away. So does 0 for a device's resource: kubectl and helm drop the nulls of lists
when they change an object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deploy.api.pod_template import MERGE_DEFAULTS, MERGE_KEYS, SHARED_LABELS, PodSettings

_RETAINING = frozenset({"volumes"})
_WHOLE = frozenset({"env"})
_QUANTITIES = frozenset({"requests", "limits"})
_NONE = (0, "0")
_OVER = {"topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}


def merged_template(own: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay a user's template over a pod's own. Labels that others select by stay."""
    result: dict[str, Any] = merged(own, over)
    labels = own["metadata"]["labels"]
    kept = {name: value for name, value in labels.items() if name in SHARED_LABELS}
    return result | {"metadata": merged(result["metadata"], {"labels": kept})}


def with_settings(own: Mapping[str, Any], over: PodSettings, container: str) -> dict[str, Any]:
    """A pod's template with a user's pod settings laid over it. Resources and variables go to
    `container`. Where the user says nothing of it, pods of these labels spread over nodes."""
    if not over.topology_spread_constraints:
        spread = {"labelSelector": {"matchLabels": own["metadata"]["labels"]}, "maxSkew": 1}
        own = merged(own, {"spec": {"topologySpreadConstraints": [_OVER | spread]}})
    made = merged_template(merged(own, over.own_template(container)), over.pod_template)
    return _guaranteed(made) if over.guaranteed else made


def _guaranteed(template: Mapping[str, Any]) -> dict[str, Any]:
    spec = dict(template["spec"])
    for kind in spec.keys() & {"containers", "initContainers"}:
        spec[kind] = [_limited(each, each.get("resources", {})) for each in spec[kind]]
    return {**template, "spec": spec}


def _limited(container: Mapping[str, Any], resources: Mapping[str, Any]) -> dict[str, Any]:
    held = {**resources.get("requests", {}), **resources.get("limits", {})}
    return {**container, "resources": {**resources, "requests": held, "limits": held}}


def merged(own: Any, over: Any, key: str = "") -> Any:
    """Lay `over` over `own`, as what lies under `key`. Neither is changed."""
    if isinstance(over, Mapping):
        under = own if isinstance(own, Mapping) else {}
        result = dict(under) | {
            name: merged(under.get(name), value, name) for name, value in over.items()
        }
        return {name: value for name, value in result.items() if not _is_none(value, name, key)}
    if key in MERGE_KEYS and isinstance(over, list | tuple):
        return _merged_lists(own or (), over, key)
    return over


def _is_none(value: Any, name: str, parent: str) -> bool:
    return value is None or (parent in _QUANTITIES and "/" in name and value in _NONE)


def _merged_lists(own: Sequence[Any], over: Sequence[Any], key: str) -> list[Any]:
    """Merge two lists by keys. Members of `own` keep their order; new ones come after them."""

    def identity(item: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(item.get(name, MERGE_DEFAULTS.get(name)) for name in MERGE_KEYS[key])

    theirs = {identity(item): item for item in over}
    result = []
    for item in own:
        laid_over = theirs.pop(identity(item), None)
        if laid_over is not None and key in _WHOLE:
            item = {}
        elif laid_over is not None and key in _RETAINING:
            item = {name: value for name, value in item.items() if name in laid_over}
        result.append(merged(item, laid_over or {}))
    return result + [merged({}, item) for item in theirs.values()]
