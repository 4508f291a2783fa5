"""The operator's process: caches always, reconcilers while it leads.

1. Caches follow the API server from the start, so that a successor knows everything at once.
2. The operator that holds the Lease works on the queue. It begins with every key, also those of
   ServingClusters that are gone and have WorkerPools left.
3. One that loses the Lease begins nothing any more. Each write asks first whether it still leads.
   Events are still written: what they say has happened.
"""

from __future__ import annotations

import logging
import threading
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

log = logging.getLogger(__name__)

_STOP_S = 20.0
_EVENTS_S = 5.0
_NUM_WORKERS = 4
"""ServingClusters that are reconciled at once."""


@dataclass(frozen=True)
class ControllerSettings:
    lease: Key
    identity: str
    """Of this process, among those that may lead."""
    release: Release
    namespace: str | None = None
    """What it looks after; None: every namespace."""


class Controller:
    """Own the caches, the elector and, while it leads, the queue and its workers."""

    def __init__(self, kube: Kube, settings: ControllerSettings) -> None:
        self._settings = settings
        self._elector = Elector(kube, settings.lease, settings.identity)
        self._caches = Caches(kube, settings.namespace, InformerSettings())
        self._caches.add_handler(self._enqueue)
        self._fleets = FleetWatch(self._enqueue)
        self._recorder = EventRecorder(kube, kube.field_manager)
        self._reconciler = ClusterReconciler(
            kube.guarded(self._elector.is_leading),
            self._caches,
            self._fleets,
            self._recorder.record,
            settings.release,
        )
        clusters, pools = self._caches.clusters.snapshot, self._caches.pools.snapshot
        resources = {"ServingCluster": clusters, "WorkerPool": pools}
        self.metrics = OperatorMetrics(self._elector.is_leading, self._num_waiting, resources)
        self._lock = threading.Lock()
        self._queue: WorkQueue[Key] | None = None
        self._workers: Workers[Key] | None = None

    def start(self) -> None:
        self._caches.start()
        self._recorder.start()
        self._elector.start(self._begin, self._end)

    def stop(self) -> bool:
        """Give the Lease back when nothing is under way any more; False where something is."""
        ended = self._elector.stop()
        self._fleets.stop()
        ended &= self._recorder.stop(_EVENTS_S)
        return self._caches.stop() and ended

    def is_ready(self) -> bool:
        """Whether it could lead: its caches are complete."""
        return self._caches.wait_synced(0)

    def _num_waiting(self) -> int:
        with self._lock:
            return 0 if self._queue is None else len(self._queue)

    def _enqueue(self, cluster: Key) -> None:
        with self._lock:
            if self._queue is not None:
                self._queue.add(cluster)

    def _begin(self) -> None:
        log.info("%s leads", self._settings.identity)
        queue: WorkQueue[Key] = WorkQueue()
        workers = Workers(
            queue,
            self.metrics.counted(self._reconcile),
            _NUM_WORKERS,
            "cluster",
            self._reconciler.report_fault,
        )
        with self._lock:
            self._queue, self._workers = queue, workers
        for key in self._caches.known_clusters:
            queue.add(key)
        workers.start()

    def _end(self) -> None:
        with self._lock:
            workers, self._queue, self._workers = self._workers, None, None
        if workers is not None and not workers.stop(_STOP_S):
            log.warning("%s: a reconcile has not ended", self._settings.identity)
        self._fleets.stop()

    def _reconcile(self, cluster: Key) -> float | None:
        """Not before the caches are complete: what is missing there would be made anew."""
        if not self._caches.wait_synced(_STOP_S):
            raise UnreachableError("the caches are not complete yet")
        return self._reconciler.reconcile(cluster)
