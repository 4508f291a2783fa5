"""The kinds that the operator reads or writes."""

from __future__ import annotations

from deploy.api.naming import GROUP, VERSION
from deploy.controller.objects import Resource

SERVING_CLUSTERS = Resource(GROUP, VERSION, "servingclusters")
WORKER_POOLS = Resource(GROUP, VERSION, "workerpools")
RAY_CLUSTERS = Resource("ray.io", "v1", "rayclusters")
PODS = Resource("", "v1", "pods")
CONFIG_MAPS = Resource("", "v1", "configmaps")
SECRETS = Resource("", "v1", "secrets")
SERVICES = Resource("", "v1", "services")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts")
DEPLOYMENTS = Resource("apps", "v1", "deployments")
