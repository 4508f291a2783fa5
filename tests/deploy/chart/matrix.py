"""Every switch of the chart with its settings, and few combinations with every pair of them. Among
them are names that YAML reads as something else where they stand bare: 1e3, on, 123."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Values = dict[str, Any]

ON = {"model": {"claim": {"claimName": "weights"}}}

SWITCHES: Mapping[str, Sequence[Values]] = {
    "names": ({}, {"nameOverride": "bt"}, {"fullnameOverride": "relay"},
              {"fullnameOverride": "1e3"}),
    "images": (
        {},
        {"images": {"registry": "registry.example.com:5000/mirror/", "tag": "1.2.3"}},
        {"images": {"pullSecrets": ["123"], "controller": {"digest": "sha256:" + "0" * 64}}},
    ),
    "scope": ({}, {"watchNamespaces": ["serving"]}, {"watchNamespaces": ["serving", "123"]}),
    "replicas": ({"operator": {"replicas": 0}}, {}, {"operator": {"replicas": 3}}),
    "operator": (
        {},
        {
            "operator": {
                "logLevel": "debug",
                "nodeSelector": {"disk": "ssd"},
                "tolerations": [{"key": "control", "operator": "Exists"}],
                "priorityClassName": "1e3",
                "podAnnotations": {"a": "b"},
                "podLabels": {"team": "serving"},
                "affinity": {"nodeAffinity": {}},
            }
        },
    ),
    "account": ({}, {"serviceAccount": {"create": False, "name": "123"}},
                {"serviceAccount": {"name": "other", "annotations": {"a": "b"}}}),
    "rbac": ({}, {"rbac": {"create": False}}),
    "crds": ({}, {"crds": {"upgrade": False}}),
    "cluster": (
        {},
        {"cluster": {"enabled": True, "spec": ON}},
        {"cluster": {"enabled": True, "name": "on", "spec": ON | {
            "pools": {"prefill": None, "decode": None, "all": {"role": "mixed"}},
            "router": {"tls": {"secretName": "tls"}, "auth": {"tokenSecretName": "tenants"}},
        }}},
    ),
    "preset": tuple({"cluster": {"nodes": {"preset": it}}} for it in ("cpu", "gpu", "gpu-rdma")),
    "redis": (
        {},
        {"cluster": {"redis": {"enabled": False}}},
        {"cluster": {"redis": {"enabled": True, "storage": "1Gi", "secretName": "123",
                               "storageClassName": "1", "nodeSelector": {"disk": "ssd"},
                               "tolerations": [{"key": "control", "operator": "Exists"}]}}},
    ),
    "shared memory": ({}, {"cluster": {"nodes": {"sharedMemory": True}}}),
    "memlock": ({}, *({"cluster": {"nodes": {"ipcLock": each}}} for each in (True, False))),
    "nodes": (
        {},
        {"cluster": {"nodes": {"nodeSelector": {"gpu": "h100"}, "tolerations": [], "shmSize": "8Gi",
                               "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
                               "resources": {"hugepages-2Mi": "4Gi"}, "env": {"UCX_TLS": "all"}}}},
    ),
    "cache": ({}, {"cluster": {"nodes": {"weightsCache": {"hostPath": "/mnt/weights"}}}},
              {"cluster": {"nodes": {"weightsCache": {"claimName": "weights"}}}}),
    "hub": ({}, {"hub": {"offline": True}},
            {"hub": {"endpoint": "https://hub.example.com", "tokenSecretName": "hub"}}),
    "dashboards": ({}, {"dashboards": {"enabled": True}},
                   {"dashboards": {"enabled": True, "namespace": "123", "labelValue": "yes"}}),
    "alerts": ({}, {"alerts": {"enabled": True}},
               {"alerts": {"enabled": True, "namespace": "123",
                           "labels": {"release": "prometheus"}}}),
    "monitor": ({}, {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}),
}  # fmt: skip


def joined(one: Values, other: Values) -> Values:
    """Mappings key by key, as helm joins values files."""
    result = dict(one)
    for key, value in other.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = joined(result[key], value) if both else value
    return result


def each_once() -> list[Values]:
    """Combinations in which each setting of each switch stands at least once."""
    most = max(len(settings) for settings in SWITCHES.values())
    return [
        _values({name: round_ % len(settings) for name, settings in SWITCHES.items()})
        for round_ in range(most)
    ]


def pairwise(seed: int = 1) -> list[Values]:
    """Combinations in which any two settings of two switches meet at least once."""
    names, rng = list(SWITCHES), random.Random(seed)
    missing = {
        frozenset(((a, i), (b, j)))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(SWITCHES[a]))
        for j in range(len(SWITCHES[b]))
    }
    combinations = []
    while missing:
        chosen = dict(min(missing, key=sorted))
        for name in rng.sample(names, len(names)):
            if name not in chosen:
                chosen[name] = _best(name, chosen, missing)
        missing -= {frozenset(pair) for pair in itertools.combinations(chosen.items(), 2)}
        combinations.append(chosen)
    return [_values(chosen) for chosen in combinations]


def _best(name: str, chosen: Mapping[str, int], missing: set[frozenset[tuple[str, int]]]) -> int:
    """The setting that meets most of those that it has not met yet."""

    def num_new(index: int) -> int:
        return sum(frozenset(((name, index), other)) in missing for other in chosen.items())

    return max(range(len(SWITCHES[name])), key=num_new)


def _values(chosen: Mapping[str, int]) -> Values:
    values: Values = {}
    for name, index in chosen.items():
        values = joined(values, SWITCHES[name][index])
    return values
