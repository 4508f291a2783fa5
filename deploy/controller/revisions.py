"""What a pool's workers must be started anew for, as a short code: the pool's revision; and what
workers must share to exchange KV and to give the same tokens: the cohort.

Both are of what people wrote, field by field: a default of ours that changes, a field that a later
release adds, the release's own images are none of it. So an operator's upgrade changes no code.
Whoever adds a field here gives it only where it is set.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.api.worker_pool import WorkerPoolSpec

_OF_WORKERS = (
    ("servedModelName",),
    ("logLevel",),
    ("engine",),
    ("transfer",),
    ("worker",),
    ("decode",),
    ("registry",),
    ("images", "worker"),
    ("images", "pullSecrets"),
    ("fabric", "nodeLabel"),
    ("fabric", "required"),
    ("ray", "version"),
    ("model", "credentialsSecretName"),
    ("hub", "endpoint"),
    ("hub", "tokenSecretName"),
)
"""Of a ServingCluster's spec: what its worker pods or their processes are told."""
_OF_WORKER_PODS = (*_OF_WORKERS, ("spotNotices",))
"""And what runs beside Ray there alone."""
_OF_HEAD = (
    *_OF_WORKERS,
    ("supervisor",),
    ("ray", "tokenSecretName"),
    ("ray", "gcsFaultTolerance"),
    ("ray", "headTemplate"),
)
_OF_MODEL = (
    ("model", "name"),
    ("model", "claim", "claimName"),
    ("model", "claim", "path"),
    ("model", "uri"),
    ("model", "revision"),
)
_OF_TOKENS = ("backend", "dtype", "blockSize")
"""Engine settings that decide what KV is, and which tokens follow."""
_OF_FAKE_TOKENS = ("vocabSize", "window")
_LETTERS = "bcdfghjkmnpqrstvwxz23456789"
"""None that makes words, none that is taken for another."""
_LENGTH = 5


@dataclass(frozen=True)
class Revision:
    """One version of a pool: to supervisor, registry and KubeRay a pool of its own."""

    name: str
    """`<pool>-<code>`."""
    pool: str
    cohort: str


def revision_of(cluster: Mapping[str, Any], name: str, pool: WorkerPoolSpec) -> Revision:
    """What a pool is to be. `cluster`: the ServingCluster's spec as its object spells it; `name`:
    the pool's in it."""
    cohort = cohort_of(cluster)
    is_offline = bool(_at(cluster, ("hub", "offline")))
    said = {
        "offline": is_offline or None,
        "cohort": cohort,
        "cluster": _picked(cluster, _OF_WORKER_PODS),
        "role": pool.role,
        "tensor": pool.parallelism.tensor,
        "engine": pool.engine,
        "template": pool.template,
        "drainTimeout": pool.drain_timeout,
    }
    return Revision(f"{name}-{_code(said)}", name, cohort)


def head_code(cluster: Mapping[str, Any]) -> str:
    """Of all that the head's pod is made of; `cluster` as in `revision_of`."""
    return _code(_picked(cluster, _OF_HEAD) | _picked(cluster, _OF_MODEL))


def cohort_of(cluster: Mapping[str, Any]) -> str:
    """Of a ServingCluster's spec, as its object spells it. Another pool of the same settings
    changes nothing."""
    shared = cluster.get("engine", {})
    engines = [pool.get("engine", {}) for pool in cluster["pools"].values()]
    kinds = {_canonical(_of_tokens(shared, engine)) for engine in engines}
    return _code({"model": _picked(cluster, _OF_MODEL), "engines": sorted(kinds)})


def _of_tokens(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    fake = {**shared.get("fake", {}), **own.get("fake", {})}
    both = {**shared, **own}
    said = {name: both.get(name) for name in _OF_TOKENS}
    return said | {f"fake.{name}": fake.get(name) for name in _OF_FAKE_TOKENS}


def _picked(spec: Mapping[str, Any], paths: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    return {".".join(path): _at(spec, path) for path in paths}


def _at(value: Mapping[str, Any], path: tuple[str, ...]) -> Any:
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
