"""Specs that are sound, and changes that spoil them, each with the field that is refused."""

from __future__ import annotations

import copy
from typing import Any

CLUSTER_KIND = "ServingCluster"
CLUSTER: dict[str, Any] = {
    "model": {"name": "models/demo"},
    "pools": {"prefill": {"role": "prefill"}, "decode": {"role": "decode", "initialReplicas": 2}},
}
POOL: dict[str, Any] = {"role": "decode", "cluster": "main", "pool": "decode", "replicas": 2}


def custom_object(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"namespace": "default", "name": "main"}, "spec": spec}


def changed(spec: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy with one value set; None takes it away."""
    new = copy.deepcopy(spec)
    *way, last = path.split(".")
    inner = new
    for name in way:
        inner = inner.setdefault(name, {})
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return new


MUTUAL = {"secretName": "cert", "requireClientCertificate": True}
PASSED_THROUGH = {"annotations": {"nginx.ingress.kubernetes.io/ssl-passthrough": "true"}}

BAD_ADVANCED = [
    ("advanced.router", {"auth": {"tokens": "/tokens"}}, "spec.advanced.router.auth"),
    ("advanced.router", {"port": 7000}, "spec.advanced.router.port"),
    ("advanced.router", {"admission": {"maxQueue": 0}}, "spec.advanced.router.admission.maxQueue"),
    ("advanced.router", {"fleetWaitSecond": 9}, "spec.advanced.router.fleetWaitSecond"),
    (
        "advanced.router.placement",
        {"localPrefill": "never"},
        "spec.advanced.router.placement.localPrefill",
    ),
    ("advanced.planner", {"ttftTargetSeconds": 1}, "spec.advanced.planner.ttftTargetSeconds"),
    ("advanced.planner", {"stableWindowSeconds": 1}, "spec.advanced.planner.stableWindowSeconds"),
    ("advanced.engine", {"backend": "none"}, "spec.advanced.engine.backend"),
    ("advanced", {"routers": {}}, "spec.advanced.routers"),
    ("planner", {"scaleToZeroAfterSeconds": 1}, "spec.planner.scaleToZeroAfterSeconds"),
    ("pools.decode.engine", {"maxNumSeqs": 600}, "spec.pools.decode.engine.maxNumBatchedTokens"),
]
"""Of settings that no schema knows, and of several together."""
BAD_CLUSTERS = [
    ("rollout", {"maxSurge": 0}, "spec.rollout.maxUnavailable"),
    ("rollout", {"steps": [0, 50]}, "spec.rollout.steps"),
    ("pools.decode.tolerations", [{"kee": "a"}], "spec.pools.decode.tolerations[0].kee"),
    ("pools.decode.resources", {"limit": {"cpu": "1"}}, "spec.pools.decode.resources.limit"),
    ("router.env", [{"value": "x"}], "spec.router.env[0].name"),
    ("router.affinity", {"podAffinities": {}}, "spec.router.affinity.podAffinities"),
    ("router.topologySpreadConstraints", [{"maxSkew": 1}],
     "spec.router.topologySpreadConstraints[0].topologyKey"),
    ("model.name", None, "spec.model.name"),
    ("model.claim", {"claimName": "weights"}, "spec.model.name"),
    ("model.uri", "ftp://host/model", "spec.model.uri"),
    ("model.uri", "https://host/model?signature=1", "spec.model.uri"),
    ("model.uri", "https://user@host/model", "spec.model.uri"),
    ("model", {"uri": "s3://bucket/model", "revision": "v2"}, "spec.model.revision"),
    ("model.revision", "two words", "spec.model.revision"),
    ("model.credentialsSecretName", "keys", "spec.model.credentialsSecretName"),
    ("hub", {"endpoint": "hub.example.com"}, "spec.hub.endpoint"),
    ("model.claim", {"claimName": "weights", "path": "../etc"}, "spec.model.claim.path"),
    ("pools", {"prefill": {"role": "prefill"}}, "spec.pools"),
    ("pools", {"Decode_1": {"role": "decode"}}, "spec.pools"),
    ("pools.decode.role", "decoder", "spec.pools.decode.role"),
    ("pools.decode.initialReplicas", 9, "spec.pools.decode.initialReplicas"),
    ("pools.decode.minReplicas", 99, "spec.pools.decode.minReplicas"),
    ("pools.decode.minReplicas", 3, "spec.pools.decode.initialReplicas"),
    ("pools.mixed", {"role": "mixed", "rolePlan": {"prefill": 9}}, "spec.pools.mixed.rolePlan"),
    ("pools.decode.parallelism", {"tensor": 0}, "spec.pools.decode.parallelism.tensor"),
    ("pools.decode.drainTimeout", "soon", "spec.pools.decode.drainTimeout"),
    ("pools.decode.rolePlan", {"prefill": 1}, "spec.pools.decode.rolePlan"),
    ("pools.decode.rollout", {"maxSurge": 1}, "spec.pools.decode.rollout"),
    ("pools.decode.scaling", {"mode": "auto"}, "spec.pools.decode.scaling.mode"),
    ("pools.decode.replicas", 3, "spec.pools.decode.replicas"),
    ("router.replicas", 0, "spec.router.replicas"),
    ("router.tls", {}, "spec.router.tls.secretName"),
    ("internalTLS", {"issuerRef": {}}, "spec.internalTLS.issuerRef.name"),
    ("router.gateway", "public", "spec.router.hostname"),
    ("router", {"hostname": "a.b", "httpHostname": "a.b"}, "spec.router.httpHostname"),
    ("router", {"httpHostname": "a.b", "tls": MUTUAL}, "spec.router.tls.requireClientCertificate"),
    ("router.ingress", {"className": "nginx"}, "spec.router.ingress"),
    ("router", {"hostname": "a.b", "gateway": "edge", "ingress": {}}, "spec.router.ingress"),
    ("router", {"hostname": "a.b", "ingress": {"className": "My class"}},
     "spec.router.ingress.className"),
    ("router", {"hostname": "a.b", "tls": MUTUAL}, "spec.router.tls.requireClientCertificate"),
    ("router", {"hostname": "a.b", "tls": MUTUAL, "ingress": {"className": "nginx"}},
     "spec.router.tls.requireClientCertificate"),
    ("engine.blockSize", "16", "spec.engine.blockSize"),
    ("engine.maxNumBatchedTokens", 8, "spec.engine.maxNumBatchedTokens"),
    ("engine.dtype", "bf16", "spec.engine.dtype"),
    ("engine.device", "gpu", "spec.engine.device"),
    ("engine.backend", "fake", "spec.engine.backend"),
    ("pools.decode.engine", {"dtype": "bf16"}, "spec.pools.decode.engine.dtype"),
    ("pools.decode.engine", {"maxNumSeq": 4}, "spec.pools.decode.engine.maxNumSeq"),
    ("planner", {"ttftTargetSeconds": 0}, "spec.planner.ttftTargetSeconds"),
    ("rollout.strategy", "Canary", "spec.rollout.strategy"),
    ("ray.gcsFaultTolerance", {"redisAddress": "x"}, "spec.ray.gcsFaultTolerance.redisAddress"),
    (
        "ray.gcsFaultTolerance",
        {"redisAddress": "redis:6379", "redisSecretName": ""},
        "spec.ray.gcsFaultTolerance.redisSecretName",
    ),
    ("ray.tokenSecretName", "", "spec.ray.tokenSecretName"),
    ("ray.version", "nightly", "spec.ray.version"),
    ("ray.version", "2.51.2", "spec.ray.version"),
    ("model.name", "", "spec.model.name"),
    ("model", {"claim": {"claimName": ""}}, "spec.model.claim.claimName"),
    (
        "model",
        {"uri": "s3://bucket/model", "credentialsSecretName": "a key"},
        "spec.model.credentialsSecretName",
    ),
    ("hub", {"tokenSecretName": "Hub"}, "spec.hub.tokenSecretName"),
    ("fabric", {"nodeLabel": ""}, "spec.fabric.nodeLabel"),
    ("fabric", {"nodeLabel": "not a label"}, "spec.fabric.nodeLabel"),
    ("fabric", {"nodeLabel": "a/b/c"}, "spec.fabric.nodeLabel"),
    ("router.hostname", "UPPER_case!", "spec.router.hostname"),
    ("router", {"hostname": "llm.example.com", "gateway": "a/b/c"}, "spec.router.gateway"),
    ("router.tls", {"secretName": ""}, "spec.router.tls.secretName"),
    ("router.tls", {"issuerRef": {"name": ""}}, "spec.router.tls.issuerRef.name"),
    ("router.auth", {"tokenSecretName": ""}, "spec.router.auth.tokenSecretName"),
    ("router.traceEndpoint", "collector:4318", "spec.router.traceEndpoint"),
    ("images.pullSecrets", ["Bad Name"], "spec.images.pullSecrets"),
]  # fmt: skip
GOOD_CLUSTERS: list[tuple[str, object]] = [
    ("advanced.router.placement", {"localPrefill": "never"}),
    ("advanced.router.admission", {"fleetWaitSeconds": 20}),
    ("advanced", {"engine": {"backend": "fake"}}),
    ("pools.decode.engine", {"maxNumSeqs": 600, "maxNumBatchedTokens": 900}),
    ("router.tls", {"secretName": "cert"}),
    ("router.tls", {"issuerRef": {"name": "ca.example.com"}}),
    ("router.hostname", "*.llm.example.com"),
    ("internalTLS", {"issuerRef": {"name": "inside"}}),
    ("router", {"hostname": "llm.example.com", "gateway": "edge/public.https"}),
    ("router", {"hostname": "a.b", "gateway": "edge", "tls": MUTUAL}),
    ("router", {"hostname": "a.b", "tls": MUTUAL, "ingress": PASSED_THROUGH}),
    ("router", {"tls": MUTUAL}),
    ("router", {"hostname": "a.b", "httpHostname": "api.b", "gateway": "edge"}),
    ("model.revision", "v2"),
    ("model", {"uri": "https://host/model", "credentialsSecretName": "keys"}),
    ("fabric.nodeLabel", "network.topology.nvidia.com/leaf_0.a"),
    ("fabric.nodeLabel", "rack"),
    ("images.pullSecrets", ["mirror", "mirror.example.com"]),
    ("ray.version", "2.52"),
    ("ray.version", "2.60.0"),
    ("ray.version", "2.100.0rc1+cpu"),
    ("ray.version", "3.0.0.dev0"),
]
BAD_NAMES = ["7b", "qwen3.8b", "c" * 54]
"""Which Kubernetes takes for custom resources."""
BAD_POOLS = [
    ("replicas", 9, "spec.replicas"),
    ("minReplicas", 3, "spec.replicas"),
    ("minReplicas", 99, "spec.minReplicas"),
    ("role", None, "spec.role"),
    ("rolePlan", {"decode": 1}, "spec.rolePlan"),
    ("rolePlan", {"decode": 9}, "spec.rolePlan"),
]
