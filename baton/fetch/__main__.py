"""`python -m baton.fetch`: what a pod's init container runs to have a model on its node.

`--uri URI --folder FOLDER [--text-only]` fetches a checkpoint from https or S3. `--name NAME
[--revision REVISION]` fetches a model of the Hugging Face hub, or checks that a folder holds one.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from functools import partial
from pathlib import Path

from baton.errors import BatonError, ConfigError
from baton.fetch.checkpoint import Fetcher
from baton.model_files import file_in
from baton.model_folder import CONFIG, Report, fetch_from_hub, is_hub_name


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m baton.fetch", description="have a model in a folder of this node"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--uri", help="an https or s3 folder, or a tar file there")
    source.add_argument("--name", help="on the Hugging Face hub, or a folder that is here")
    parser.add_argument("--folder", type=Path, help="where the files of --uri are to lie")
    parser.add_argument("--text-only", action="store_true", help="no weights: what routers read")
    parser.add_argument("--revision", help="a branch, tag or commit of --name; else the main one")
    options = parser.parse_args()
    # Signals without a handler do not end the first process of a container. A fetch by URI ends at
    # once, at any line, and the next run continues; the hub's ends its child first.
    leave = partial(_leave, ends_at_once=options.uri is not None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    report = partial(print, flush=True)
    try:
        if options.uri:
            Fetcher(os.environ, report).fetch(options.uri, options.folder, options.text_only)
        else:
            _have_named(options.name, options.revision, report)
    except BatonError as error:
        print(f"cannot fetch the model: {error}", file=sys.stderr)
        return 1
    return 0


def _leave(number: int, frame: object, *, ends_at_once: bool) -> None:
    if ends_at_once:
        os._exit(128 + number)
    sys.exit(128 + number)


def _have_named(name: str, revision: str | None, report: Report) -> None:
    """Fetch a model of the hub unless its name is a folder that is here. Raises ConfigError."""
    if file_in(Path(name), CONFIG):  # its name may look like one on the hub
        report(f"{name} is there")
    elif not is_hub_name(name):
        raise ConfigError(f"{name} holds no {CONFIG}", field="model")
    else:
        report(f"it is in {fetch_from_hub(name, revision, report, report)}")


if __name__ == "__main__":
    sys.exit(main())
