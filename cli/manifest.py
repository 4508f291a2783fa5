"""`baton deploy`: a cluster file as a manifest for `kubectl apply -f -`."""

from __future__ import annotations

import argparse

import yaml

from baton.config.cluster import ClusterConfig, load_config
from deploy.api.write import secrets_to_make, serving_cluster


def deploy(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.file) if arguments.file else ClusterConfig()
    made = serving_cluster(config, arguments.name, arguments.namespace)
    for command in secrets_to_make(config, arguments.name):
        space = f" -n {arguments.namespace}" if arguments.namespace else ""
        print(f"# first: {command}{space}")
    print(yaml.safe_dump(made, sort_keys=False, allow_unicode=True), end="")
    return 0
