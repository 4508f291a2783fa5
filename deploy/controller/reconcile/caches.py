"""What the operator follows at the API server, and which ServingCluster a change concerns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from deploy.controller.kit.informer import Informer, InformerSettings
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Object, Resource, Selection, key_of
from deploy.controller.manifests.common import CLUSTER_LABEL
from deploy.controller.manifests.resources import (
    DEPLOYMENTS,
    PODS,
    RAY_CLUSTERS,
    SERVING_CLUSTERS,
    WORKER_POOLS,
)


def cluster_keys(obj: Object) -> Iterable[Key]:
    """Return the ServingCluster of an object, by the label that everything of one carries."""
    metadata = obj["metadata"]
    name = metadata.get("labels", {}).get(CLUSTER_LABEL)
    return [Key(metadata["namespace"], name)] if name else []


class Caches:
    """Own one informer for each kind. That of RayClusters says when to look: each look lists them
    anew."""

    def __init__(self, kube: Kube, namespace: str | None, settings: InformerSettings) -> None:
        """`namespace`: None follows all of them."""
        everything = Selection(namespace=namespace)
        labelled = Selection(namespace=namespace, labels=CLUSTER_LABEL)
        self.clusters = Informer(kube, SERVING_CLUSTERS, everything, settings)
        self.pools = Informer(kube, WORKER_POOLS, everything, settings)
        self.pods = Informer(kube, PODS, labelled, settings)
        self.ray_clusters = Informer(kube, RAY_CLUSTERS, labelled, settings, is_of_others=True)
        self.deployments = Informer(kube, DEPLOYMENTS, labelled, settings)
        self._dependents = (self.pools, self.pods, self.ray_clusters, self.deployments)
        self._all = (self.clusters, *self._dependents)

    def add_handler(self, handler: Callable[[Key], None]) -> None:
        """Have `handler` get the key of each ServingCluster of which anything has changed."""
        self.clusters.add_handler(handler, lambda obj: (key_of(obj),))
        for informer in self._dependents:
            informer.add_handler(handler, cluster_keys)

    def start(self) -> None:
        for informer in self._all:
            informer.start()

    def wait_synced(self, timeout_s: float) -> bool:
        give_up_at = time.monotonic() + timeout_s
        return all(each.wait_synced(max(0.0, give_up_at - time.monotonic())) for each in self._all)

    def stop(self) -> bool:
        ended = [informer.stop() for informer in self._all]  # each, also after one that does not
        return all(ended)

    def of_cluster(self, informer: Informer, cluster: Key) -> list[Object]:
        """List a kind's objects of one ServingCluster, by name."""
        found = informer.snapshot()
        return [found[key] for key in sorted(found) if cluster in cluster_keys(found[key])]

    @property
    def of_written(self) -> Mapping[Resource, Informer]:
        """Return the informers of kinds that the operator writes, too."""
        return {
            WORKER_POOLS: self.pools,
            RAY_CLUSTERS: self.ray_clusters,
            DEPLOYMENTS: self.deployments,
        }
