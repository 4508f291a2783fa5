"""`python -m tests.k8s.control_plane.build`: make a control plane be at hand, once per machine."""

from __future__ import annotations

import functools
import shutil
import sys
from pathlib import Path

from tests.k8s.control_plane.assets import find
from tests.k8s.control_plane.errors import BuildError, NotAtHandError, NotBuiltError
from tests.k8s.control_plane.once import made_once
from tests.k8s.control_plane.recipe import TOOLS, built_folder, failure_note, make
from tests.k8s.control_plane.steps import Steps

_LIMIT_S = 1500.0
_WAIT_FOR_ANOTHER_S = 1600.0

_tell = functools.partial(print, flush=True)


def build() -> None:
    """Raises BuildError, and notes it for those who will look for the programs."""
    target, note = built_folder(), failure_note()
    try:
        made_once(target, _make, _WAIT_FOR_ANOTHER_S)
    except (BuildError, OSError) as error:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(str(error).splitlines()[0])
        raise BuildError(str(error)) from error
    note.unlink(missing_ok=True)


def _make(folder: Path) -> None:
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        raise BuildError(f"missing on this machine: {', '.join(missing)} (Debian's packages)")
    _tell(f"building a Kubernetes control plane for tests into {built_folder()} (about 5 minutes)")
    log = folder / "build.log"
    steps = Steps(log, _LIMIT_S, _tell)
    make(folder, steps)
    steps.tell("done")


def main() -> int:
    try:
        try:
            find()
        except NotBuiltError:
            build()
    except (BuildError, NotAtHandError) as error:
        print(f"no control plane for tests: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
