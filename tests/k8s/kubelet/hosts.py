"""Pure: which names pods reach each other by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_LOCAL = "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"


def service_hosts(services: Iterable[Mapping[str, Any]], pods: Iterable[Mapping[str, Any]]) -> str:
    """Lines of /etc/hosts: each Service's names, once for each pod that it leads to."""
    known = [pod for pod in pods if (pod.get("status") or {}).get("podIP")]
    lines = []
    for service in services:
        names = _names(service)
        lines += [
            f"{pod['status']['podIP']} {names}\n"
            for pod in sorted(known, key=lambda pod: str(pod["metadata"]["name"]))
            if _leads_to(service["spec"], pod)
        ]
    return "".join(sorted(lines))


def hosts_of(pod_name: str, address: str, services: str) -> str:
    """A pod's whole /etc/hosts; `services`: of `service_hosts`."""
    return f"{_LOCAL}{address} {pod_name}\n{services}"


def is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def selects(labels: Mapping[str, str], pod: Mapping[str, Any]) -> bool:
    own = pod["metadata"].get("labels") or {}
    return all(own.get(name) == value for name, value in labels.items())


def _leads_to(spec: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    if not spec.get("selector") or not selects(spec["selector"], pod):
        return False
    if spec.get("publishNotReadyAddresses"):
        return True
    return is_ready(pod) and "deletionTimestamp" not in pod["metadata"]


def _names(service: Mapping[str, Any]) -> str:
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    ends = ("", f".{namespace}", f".{namespace}.svc", f".{namespace}.svc.cluster.local")
    return " ".join(name + end for end in ends)
