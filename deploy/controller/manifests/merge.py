"""A user's PodTemplateSpec over the operator's own, as `kubectl apply` merges: mappings key by key,
lists of named things by their keys, all else replaced. A volume has one source: of a volume that
the user names, too, only those keys stay that stand there (Kubernetes' `retainKeys`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deploy.api.pod_template import MERGE_DEFAULTS, MERGE_KEYS, SHARED_LABELS

_RETAINING = frozenset({"volumes"})


def merged_template(own: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A pod's template with a user's laid over it, but for the labels by which others find it."""
    result: dict[str, Any] = merged(own, over)
    labels = own["metadata"]["labels"]
    kept = {name: value for name, value in labels.items() if name in SHARED_LABELS}
    return result | {"metadata": merged(result["metadata"], {"labels": kept})}


def merged(own: Any, over: Any, key: str = "") -> Any:
    """`own` with `over` laid over it; null in `over` takes a key away. Neither is changed."""
    if isinstance(own, Mapping) and isinstance(over, Mapping):
        result = {name: merged(value, over[name], name) if name in over else value
                  for name, value in own.items()}  # fmt: skip
        result |= {name: value for name, value in over.items() if name not in own}
        return {name: value for name, value in result.items() if value is not None}
    if key in MERGE_KEYS and isinstance(own, Sequence) and isinstance(over, Sequence):
        return _merged_lists(own, over, key)
    return over


def _merged_lists(own: Sequence[Any], over: Sequence[Any], key: str) -> list[Any]:
    """What stands in `own` keeps its place; what is new comes after it."""

    def identity(item: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(item.get(name, MERGE_DEFAULTS.get(name)) for name in MERGE_KEYS[key])

    theirs = {identity(item): item for item in over}
    result = []
    for item in own:
        laid_over = theirs.pop(identity(item), None)
        if laid_over is not None and key in _RETAINING:
            item = {name: value for name, value in item.items() if name in laid_over}
        result.append(merged(item, laid_over or {}))
    return result + list(theirs.values())
