"""The operator's process: caches always, reconcilers while it leads.

1. Caches follow the API server from the start, so that a successor knows everything at once. The
   queue has every key, also those of ServingClusters that are gone and have WorkerPools left.
2. The operator that holds the Lease works on the keys. Another one puts each back for a moment.
3. One that loses the Lease begins nothing any more. Each write asks first whether it still leads.
   Events are still written: what they say has happened.
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.controller.kit.election import Elector
from deploy.controller.kit.errors import UnreachableError
from deploy.controller.kit.events import EventRecorder
from deploy.controller.kit.informer import InformerSettings
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key
from deploy.controller.kit.workqueue import Workers, WorkQueue
from deploy.controller.manifests.common import Release
from deploy.controller.operator_metrics import OperatorMetrics
from deploy.controller.reconcile.caches import Caches
from deploy.controller.reconcile.cluster_reconciler import ClusterReconciler
from deploy.controller.reconcile.fleet_watch import FleetWatch

_STOP_S = 10.0
_STAND_BY_S = 1.0
_EVENTS_S = 5.0
_NUM_WORKERS = 4
"""ServingClusters that are reconciled at once."""


@dataclass(frozen=True)
class ControllerSettings:
    lease: Key
    identity: str
    """The name of this process among those that may lead."""
    release: Release
    namespace: str | None = None
    """The namespace that it looks after. None: every one."""


class Controller:
    """Own the caches, the elector, the queue and its workers."""

    def __init__(self, kube: Kube, settings: ControllerSettings) -> None:
        self._elector = Elector(kube, settings.lease, settings.identity)
        self._caches = Caches(kube, settings.namespace, InformerSettings())
        self._queue = WorkQueue[Key]()
        self._caches.add_handler(self._queue.add)
        self._fleets = FleetWatch(self._queue.add)
        self._recorder = EventRecorder(kube, kube.field_manager)
        reconciler = ClusterReconciler(
            kube.guarded(self._elector.is_leading),
            self._caches,
            self._fleets,
            self._recorder.record,
            settings.release,
        )
        clusters, pools = self._caches.clusters.snapshot, self._caches.pools.snapshot
        resources = {"ServingCluster": clusters, "WorkerPool": pools}
        self.metrics = OperatorMetrics(self._elector.is_leading, self._queue.__len__, resources)
        self._counted = self.metrics.counted(reconciler.reconcile)
        self._workers = Workers(
            self._queue, self._reconcile, _NUM_WORKERS, "cluster", reconciler.report_fault
        )

    def start(self) -> None:
        self._caches.start()
        self._recorder.start()
        self._elector.start()
        self._workers.start()

    def stop(self) -> bool:
        """Give the Lease back when nothing is under way any more; False where something is, and the
        Lease runs out then."""
        ended = self._workers.stop(_STOP_S) and self._elector.stop()
        self._fleets.stop()
        ended &= self._recorder.stop(_EVENTS_S)
        return self._caches.stop() and ended

    def is_ready(self) -> bool:
        """Tell whether it could lead: its caches are complete."""
        return self._caches.wait_synced(0)

    def _reconcile(self, cluster: Key) -> float | None:
        """Reconcile while this operator leads, and not before the caches are complete: what is
        missing there would be made anew."""
        if not self._elector.is_leading():
            self._fleets.follow(cluster, None, ())
            return _STAND_BY_S
        if not self._caches.wait_synced(_STOP_S):
            raise UnreachableError("the caches are not complete yet")
        return self._counted(cluster)
