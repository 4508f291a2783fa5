"""What makes a unit: the part of a spec that workers and Ray's head must be started anew for.

Hashed is what people wrote, without defaults and without images of the release. So an operator's
upgrade makes no other unit. What all pools share and what each has of its own are hashed apart: a
unit stays the same when a pool comes or goes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.api.naming import camel
from deploy.api.pod_template import PodSettings

_WEIGHTS = (
    ("model", "name"),
    ("model", "claim", "claimName"),
    ("model", "claim", "path"),
    ("model", "uri"),
    ("model", "revision"),
)
_SHARED = (
    *_WEIGHTS,
    ("model", "credentialsSecretName"),
    ("hub", "endpoint"),
    ("hub", "tokenSecretName"),
    ("tokenizer",),
    ("servedModelName",),
    ("engine",),
    ("advanced", "engine"),
    ("advanced", "transfer"),
    ("advanced", "worker"),
    ("advanced", "decode"),
    ("advanced", "registry"),
    ("advanced", "supervisor"),
    ("images", "worker"),
    ("images", "pullSecrets"),
    ("fabric", "nodeLabel"),
    ("fabric", "required"),
    ("spotNotices",),
    ("internalTLS",),
    ("ray", "version"),
    ("ray", "tokenSecretName"),
    ("ray", "gcsFaultTolerance"),
    ("ray", "headTemplate"),
)
"""The fields of a ServingCluster's spec that all pools share."""
_MODEL = (*_WEIGHTS, ("tokenizer",), ("engine", "dtype"))
"""The fields of which clients would notice a change."""
_OF_POOL = (
    *("role", "parallelism", "engine", "drainTimeout"),
    *(camel(field.name) for field in dataclasses.fields(PodSettings)),
)
"""The fields of a WorkerPool's spec that its workers are made from."""
_LETTERS = "bcdfghjkmnpqrstvwxz23456789"
"""No vowels, which make words, and none that is taken for another."""
_LENGTH = 5


@dataclass(frozen=True)
class Unit:
    """One complete version of a model below the routers."""

    code: str
    """Its RayCluster and ConfigMap are called `<servingcluster>-<code>`."""
    shared: str
    """A hash of what all of its pools share."""
    pools: Mapping[str, str]
    """A hash of what each pool has of its own, by name."""
    model: str = ""
    """A hash of what clients would notice: weights, tokenizer, precision."""


def unit_of(cluster: Mapping[str, Any], pools: Mapping[str, Mapping[str, Any]]) -> Unit:
    """Return the unit that a ServingCluster's spec asks for with the specs of these WorkerPools."""
    said = _at_all(cluster, _SHARED)
    said["hub.offline"] = _at(cluster, ("hub", "offline")) or None
    shared = _hash(said)
    hashes = {
        name: _hash({field: pool.get(field) for field in _OF_POOL})
        for name, pool in sorted(pools.items())
    }
    code = _code({"shared": shared, "pools": hashes})
    return Unit(code, shared, hashes, _hash(_at_all(cluster, _MODEL)))


def difference(there: Unit, wanted: Unit) -> str:
    """Say why a unit is not the one that is wanted; empty: it is. Pools may come and go."""
    if there.shared != wanted.shared:
        return "the spec changes what all workers share"
    both = sorted(there.pools.keys() & wanted.pools.keys())
    changed = [name for name in both if there.pools[name] != wanted.pools[name]]
    return f"the spec changes {', '.join(changed)}" if changed else ""


def _at_all(value: Mapping[str, Any], paths: Iterable[Sequence[str]]) -> dict[str, Any]:
    return {".".join(path): _at(value, path) for path in paths}


def _at(value: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return the value at a path; None where a mapping on the way lacks it."""
    found: Any = value
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _code(said: Mapping[str, Any]) -> str:
    number = int.from_bytes(_digest(said)[:8], "big")
    letters = []
    for _ in range(_LENGTH):
        number, rest = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[rest])
    return "".join(letters)


def _hash(said: Mapping[str, Any]) -> str:
    return _digest(said).hex()[:16]


def _digest(said: Mapping[str, Any]) -> bytes:
    canonical = json.dumps(_pruned(said), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()


def _pruned(value: Any) -> Any:
    """Return a value without what says nothing: an empty section is the same as none."""
    if isinstance(value, Mapping):
        kept = {name: _pruned(item) for name, item in value.items()}
        return {name: item for name, item in kept.items() if item not in (None, {}, [])}
    if isinstance(value, list | tuple):
        return [_pruned(item) for item in value]
    return value
