"""Pure: the `ray start` that KubeRay makes of a group's `rayStartParams` and its container."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

GCS_PORT = 6379
AGENT_PORT = 52365
METRICS_PORT = 8080
_WITH_WORD = ("log-color", "include-dashboard")
"""Options that take true and false as words; of others `true` means that they are there."""
_QUANTITY = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)")
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "m": 1e-3}


def head_port(cluster: Mapping[str, Any]) -> str:
    params = cluster["spec"]["headGroupSpec"].get("rayStartParams") or {}
    return str(params.get("port", GCS_PORT))


def head_params(group: Mapping[str, Any]) -> dict[str, str]:
    return {"dashboard-host": "0.0.0.0", **_params(group)}


def worker_params(group: Mapping[str, Any], address: str) -> dict[str, str]:
    return {"address": address, **_params(group)}


def ray_start(is_head: bool, params: Mapping[str, str]) -> str:
    """A shell's command line: values stand in it as they are, quotes and all."""
    options = "".join(_option(name, value) for name, value in sorted(params.items()))
    return f"ray start {'--head ' if is_head else ''}{options}"


def _params(group: Mapping[str, Any]) -> dict[str, str]:
    container = group["template"]["spec"]["containers"][0]
    return {
        "metrics-export-port": str(METRICS_PORT),
        "dashboard-agent-listen-port": str(AGENT_PORT),
        **_resources(container.get("resources") or {}),
        **(group.get("rayStartParams") or {}),
        "block": "true",
    }


def _resources(resources: Mapping[str, Any]) -> dict[str, str]:
    """What Ray is told that the node has; a CPU that is only requested counts, too."""
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    params = {}
    if cpus := limits.get("cpu", requests.get("cpu")):
        params["num-cpus"] = str(math.ceil(quantity(cpus)))
    if memory := limits.get("memory"):
        params["memory"] = str(math.ceil(quantity(memory)))
    gpus = [count for name, count in sorted(limits.items()) if name.endswith("gpu")]
    if gpus and quantity(gpus[0]):
        params["num-gpus"] = str(math.ceil(quantity(gpus[0])))
    return params


def _option(name: str, value: str) -> str:
    if value.lower() in ("true", "false") and name not in _WITH_WORD:
        return f" --{name} " if value.lower() == "true" else ""
    return f" --{name}={value} "


def quantity(said: str | int | float) -> float:
    """Kubernetes' way to write a number: 500m, 8Gi."""
    found = _QUANTITY.fullmatch(str(said))
    assert found is not None, f"no quantity: {said}"
    return float(found[1]) * _UNITS.get(found[2], 1)


def quoted(resources: Mapping[str, float]) -> str:
    """For `rayStartParams.resources`, which goes through a shell."""
    return json.dumps(json.dumps(resources))
