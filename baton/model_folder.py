"""Have a model's folder before anything that needs it is started.

`python -m baton.model_folder --name NAME [--revision REVISION]` is what a worker pod's init
container runs where the model is named on the hub.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from baton import render
from baton.config.cluster import ClusterConfig
from baton.errors import ConfigError

Tell = Callable[[str], None]

CONFIG = "config.json"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_name(model: str) -> bool:
    """Whether it can be a name on the Hugging Face hub."""
    return _HUB_NAME.fullmatch(model) is not None


def with_model_folder(config: ClusterConfig, announce: Tell, detail: Tell) -> ClusterConfig:
    """The same cluster with its model as a folder: one named on the hub is fetched, once for all.

    Ranks that fetched it would be killed for not registering in time. What is neither a folder nor
    such a name stays. Raises ConfigError.
    """
    if Path(config.model).is_dir() or not is_hub_name(config.model):
        if config.model_revision is not None:
            raise ConfigError(
                f"model_revision is of a model on the hub; {config.model} is none",
                field="model_revision",
            )
        return config
    folder = _fetched(config.model, config.model_revision, announce, detail)
    return dataclasses.replace(
        config, model=folder, model_revision=None, served_model_name=config.model_name
    )


def _fetched(name: str, revision: str | None, announce: Tell, detail: Tell) -> str:
    """`detail` hears every per cent.

    In a process that an interrupt of this one ends: a terminal's own does not reach it.
    """
    named = f"{name} ({revision})" if revision else name
    announce(f"fetching {named} from the Hugging Face hub")
    command = [sys.executable, "-m", "engine.models.hub", name]
    if revision is not None:
        command.append(revision)
    told_percent = -1
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                told = json.loads(line)
                if "folder" in told:
                    return str(told["folder"])
                if "error" in told:
                    raise ConfigError(told["error"], field="model")
                fetched, total = told["fetched_bytes"], told["total_bytes"]
                percent = 100 * fetched // max(1, total)
                if percent != told_percent:
                    told_percent = percent
                    detail(f"{render.num_bytes(fetched)} of {render.num_bytes(total)}")
        finally:
            process.terminate()
    raise ConfigError(f"{name}: fetching it ended with status {process.returncode}", field="model")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m baton.model_folder", description="have a hub's model in this node's cache"
    )
    parser.add_argument("--name", required=True, help="on the hub, or a folder that is here")
    parser.add_argument("--revision", help="a branch, tag or commit; else the main branch")
    options = parser.parse_args()
    # The first process of a container is not ended by signals that it has no handler for.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    tell = partial(print, flush=True)
    try:
        if (Path(options.name) / CONFIG).is_file():  # its name may look like one on the hub
            tell(f"{options.name} is there")
        elif not is_hub_name(options.name):
            raise ConfigError(f"{options.name} holds no {CONFIG}", field="model")
        else:
            tell(f"it is in {_fetched(options.name, options.revision, tell, tell)}")
    except ConfigError as error:
        print(f"cannot fetch the model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
