"""What makes a unit: what people wrote that its workers and Ray's head must be started anew for.

The hashes are of objects as people wrote them: they hold no default of ours and no image of the
release. So an operator's upgrade makes no other unit.

What all pools share and what each has of its own are hashed apart: a unit stays the same when a
pool comes or goes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.api.naming import camel
from deploy.api.pod_template import PodSettings

_SHARED = (
    ("model", "name"),
    ("model", "claim", "claimName"),
    ("model", "claim", "path"),
    ("model", "uri"),
    ("model", "revision"),
    ("model", "credentialsSecretName"),
    ("hub", "endpoint"),
    ("hub", "tokenSecretName"),
    ("tokenizer",),
    ("servedModelName",),
    ("logLevel",),
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
    ("ray", "version"),
    ("ray", "tokenSecretName"),
    ("ray", "gcsFaultTolerance"),
    ("ray", "headTemplate"),
)
"""Of a ServingCluster's spec."""
_MODEL = (
    ("model", "name"),
    ("model", "claim", "claimName"),
    ("model", "claim", "path"),
    ("model", "uri"),
    ("model", "revision"),
    ("tokenizer",),
    ("engine", "dtype"),
)
"""Of these: what clients would notice."""
_OF_POOL = (
    *("role", "parallelism", "engine", "drainTimeout"),
    *(camel(field.name) for field in dataclasses.fields(PodSettings)),
)
"""Of a WorkerPool's spec."""
_LETTERS = "bcdfghjkmnpqrstvwxz23456789"
"""None that makes words, none that is taken for another."""
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
    """What a ServingCluster's spec asks for with the specs of these WorkerPools."""
    said = {".".join(path): _at(cluster, path) for path in _SHARED}
    said["hub.offline"] = _at(cluster, ("hub", "offline")) or None
    shared = _hash(said)
    hashes = {
        name: _hash({field: pool.get(field) for field in _OF_POOL})
        for name, pool in sorted(pools.items())
    }
    model = _hash({".".join(path): _at(cluster, path) for path in _MODEL})
    return Unit(_code({"shared": shared, "pools": hashes}), shared, hashes, model)


def difference(there: Unit, wanted: Unit) -> str:
    """Why a unit is not the one that is wanted, in words; empty: it is. Pools may come and go."""
    if there.shared != wanted.shared:
        return "the spec changes what all workers share"
    both = sorted(there.pools.keys() & wanted.pools.keys())
    changed = [name for name in both if there.pools[name] != wanted.pools[name]]
    return f"the spec changes {', '.join(changed)}" if changed else ""


def _at(value: Mapping[str, Any], path: Sequence[str]) -> Any:
    """None where a mapping on the way lacks it."""
    found: Any = value
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _code(said: Mapping[str, Any]) -> str:
    number = int.from_bytes(hashlib.sha256(_canonical(said).encode()).digest()[:8], "big")
    letters = []
    for _ in range(_LENGTH):
        number, rest = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[rest])
    return "".join(letters)


def _hash(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(said).encode()).hexdigest()[:16]


def _canonical(said: Any) -> str:
    return json.dumps(_pruned(said), sort_keys=True, separators=(",", ":"))


def _pruned(value: Any) -> Any:
    """Without what says nothing: an empty section is the same as none."""
    if isinstance(value, Mapping):
        kept = {name: _pruned(item) for name, item in value.items()}
        return {name: item for name, item in kept.items() if item not in (None, {}, [])}
    if isinstance(value, list | tuple):
        return [_pruned(item) for item in value]
    return value
