"""`python -m baton.fetch --uri URI --folder FOLDER [--text-only]`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from functools import partial
from pathlib import Path

from baton.fetch.checkpoint import Fetcher
from baton.fetch.sources import FetchError


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m baton.fetch", description="have a checkpoint in a folder of this node"
    )
    parser.add_argument("--uri", required=True, help="an https or s3 folder, or a tar file there")
    parser.add_argument("--folder", required=True, type=Path, help="where it is to lie")
    parser.add_argument("--text-only", action="store_true", help="no weights: what routers read")
    options = parser.parse_args()
    # Ends at once, at any line: the next run continues. Signals without a handler do not end the
    # first process of a container.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: os._exit(128 + number))
    try:
        fetcher = Fetcher(os.environ, partial(print, flush=True))
        fetcher.fetch(options.uri, options.folder, options.text_only)
    except FetchError as error:
        print(f"cannot fetch the model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
