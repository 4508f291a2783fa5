"""`baton deploy`: a cluster file as a manifest for `kubectl apply -f -`."""

from __future__ import annotations

import argparse

import yaml

from baton.config import ClusterConfig, load_config
from deploy.api.write import serving_cluster


def deploy(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.file) if arguments.file else ClusterConfig()
    made = serving_cluster(config, arguments.name, arguments.namespace)
    print(yaml.safe_dump(made, sort_keys=False, allow_unicode=True), end="")
    return 0
