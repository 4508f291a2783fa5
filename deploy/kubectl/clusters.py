"""Which ServingCluster is meant, and what it tells of where it is served. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.kubectl.errors import ChoiceError


@dataclass(frozen=True)
class Target:
    """A port of a Service."""

    namespace: str
    service: str
    port: int


def chosen(clusters: Sequence[Mapping[str, Any]], name: str | None) -> Mapping[str, Any]:
    """The cluster of this name; without one the only one. Raises ChoiceError."""
    names = sorted(cluster["metadata"]["name"] for cluster in clusters)
    if not names:
        raise ChoiceError(
            "no ServingCluster in this namespace",
            "-n NAMESPACE names another; `kubectl get servingclusters.baton.dev -A` lists all",
        )
    if name is None and len(names) > 1:
        raise ChoiceError(f"there are several: {', '.join(names)}", "--cluster NAME says which")
    found = [each for each in clusters if name in (None, each["metadata"]["name"])]
    if not found:
        raise ChoiceError(f"no ServingCluster {name!r}", f"there are: {', '.join(names)}")
    return found[0]


def target(cluster: Mapping[str, Any], endpoint: str) -> Target:
    """Where the cluster serves `endpoint`, control or grpc: HOST.NAMESPACE.svc:PORT in its status.
    Raises ChoiceError while it does not tell."""
    metadata = cluster["metadata"]
    address = (cluster.get("status") or {}).get("endpoints", {}).get(endpoint, "")
    host, _, port = address.rpartition(":")
    service, _, rest = host.partition(".")
    if not port.isdecimal() or not service or not rest:
        raise ChoiceError(
            f"ServingCluster {metadata['name']} does not tell yet where it is served",
            f"`kubectl -n {metadata['namespace']} describe servingcluster {metadata['name']}` "
            "says what it waits for",
        )
    return Target(rest.partition(".")[0], service, int(port))
