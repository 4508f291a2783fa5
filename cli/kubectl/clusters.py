"""Which ServingCluster is meant, and what it tells of where it is served. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cli.kubectl.errors import ChoiceError

_BY_TLS = "grpcs://"


@dataclass(frozen=True)
class Target:
    """A port of a Service. `tls_name`: whom its certificate names; None: plain text."""

    namespace: str
    service: str
    port: int
    tls_name: str | None = None


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
    """Where the cluster serves `endpoint`, control or grpc: HOST.NAMESPACE.svc:PORT in its status,
    after grpcs:// where that is asked by TLS. Raises ChoiceError while it does not tell."""
    metadata = cluster["metadata"]
    address = (cluster.get("status") or {}).get("endpoints", {}).get(endpoint, "")
    host, _, port = address.removeprefix(_BY_TLS).rpartition(":")
    service, _, rest = host.partition(".")
    if not port.isdecimal() or not service or not rest:
        raise ChoiceError(
            f"ServingCluster {metadata['name']} does not tell yet where it is served",
            f"`kubectl -n {metadata['namespace']} describe servingcluster {metadata['name']}` "
            "says what it waits for",
        )
    tls_name = host if address.startswith(_BY_TLS) else None
    return Target(rest.partition(".")[0], service, int(port), tls_name)
