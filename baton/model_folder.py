"""Have a model's folder before anything that needs it is started."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from baton import render
from baton.config import ClusterConfig
from baton.errors import ConfigError


def with_model_folder(
    config: ClusterConfig, announce: Callable[[str], None], detail: Callable[[str], None]
) -> ClusterConfig:
    """The same cluster with its model as a folder: one named on the hub is fetched, once for all.

    Ranks that fetched it would be killed for not registering in time. What is neither a folder nor
    such a name stays. Raises ConfigError.
    """
    from router.text.model_files import is_hub_name

    if Path(config.model).is_dir() or not is_hub_name(config.model):
        if config.model_revision is not None:
            raise ConfigError(
                f"model_revision is of a model on the hub; {config.model} is none",
                field="model_revision",
            )
        return config
    named = f"{config.model} ({config.model_revision})" if config.model_revision else config.model
    announce(f"fetching {named} from the Hugging Face hub")
    folder = _fetch(config.model, config.model_revision, detail)
    return dataclasses.replace(
        config, model=folder, model_revision=None, served_model_name=config.model_name
    )


def _fetch(name: str, revision: str | None, detail: Callable[[str], None]) -> str:
    """`detail` hears every per cent.

    In a process that an interrupt of this one ends: a terminal's own does not reach it.
    """
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
