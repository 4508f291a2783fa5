"""What routers, workers and the operator tell Prometheus, for what the chart asks of it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client import Metric

from baton.v1 import control_pb2, worker_pb2
from cluster.worker.reports import WorkerCollector
from deploy.controller.kit.objects import Key
from deploy.controller.manifests.common import CLUSTER_LABEL, OPERATOR_LABEL, POOL_LABEL
from deploy.controller.operator_metrics import OperatorMetrics
from router.report.metrics import RouterMetrics

_TARGET_LABELS = (CLUSTER_LABEL, POOL_LABEL, OPERATOR_LABEL)
OF_THE_POD = {"namespace", *(re.sub(r"\W", "_", it) for it in _TARGET_LABELS)}
"""Added to each metric by Prometheus and the PodMonitor."""

_OF_EMPTY = {  # of metrics that have no sample yet
    *("le", "state", "end", "failure", "model", "tenant", "result", "cause", "prefill"),
}
_APPENDED = re.compile(r"_(bucket|total|sum|count)$")


def names() -> set[str]:
    """Of metrics, without what a histogram or counter appends."""
    return {metric.name for metric in _metrics()}


def labels() -> set[str]:
    """Of all metrics."""
    samples = (sample for metric in _metrics() for sample in metric.samples)
    return {label for sample in samples for label in sample.labels} | _OF_EMPTY | OF_THE_POD


def names_in(expression: str) -> set[str]:
    """Of the metrics that it asks for."""
    expression = re.sub(r"by \([^)]*\)", "", expression)
    return {_APPENDED.sub("", name) for name in re.findall(r"\bbaton_\w+", expression)}


def labels_in(expression: str) -> set[str]:
    """By which it selects or groups."""
    grouped = re.findall(r"by \(([\w, ]+)\)", expression)
    selected = re.findall(r'(\w+)(?:=~|!~|!=|=)"', expression)
    return {label for group in grouped for label in group.split(", ")} | set(selected)


def _metrics() -> Iterable[Metric]:
    load, progress = worker_pb2.WorkerLoad(), control_pb2.StepProgress()
    collector = WorkerCollector("w", "p", lambda: load, lambda: progress, *[lambda: 0] * 3)
    status = {"conditions": [{"type": "t", "status": "True"}], "draining": [], "readyReplicas": 1}
    spec = {"cluster": "c", "pool": "p", "role": "decode"}
    pool = {"metadata": {}, "spec": spec, "status": status | {"unit": "u"}}
    resources = {"WorkerPool": lambda: {Key("n", "p"): pool}}
    operator = OperatorMetrics(lambda: True, lambda: 0, resources)
    for told in (RouterMetrics().registry, collector, operator.registry):
        yield from told.collect()
