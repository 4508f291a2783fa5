"""What the Prometheus operator scrapes of a cluster: its routers and workers."""

from __future__ import annotations

from deploy.controller.manifests.common import (
    CLUSTER_LABEL,
    COMPONENT_LABEL,
    POOL_LABEL,
    Object,
    Owner,
    PodMonitors,
)


def pod_monitor(owner: Owner, monitors: PodMonitors) -> Object:
    metadata = owner.metadata(owner.name, "monitor")
    metadata["labels"] |= monitors.labels
    # KubeRay gives the head a port of that name, too: of Ray's own, which its NetworkPolicy closes.
    scraped = {"key": COMPONENT_LABEL, "operator": "In", "values": ["router", "worker"]}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata,
        "spec": {
            "selector": {
                "matchLabels": {CLUSTER_LABEL: owner.name},
                "matchExpressions": [scraped],
            },
            "podTargetLabels": [CLUSTER_LABEL, POOL_LABEL],
            "podMetricsEndpoints": [{"port": "metrics", "interval": monitors.interval}],
        },
    }
