"""`python -m tests.k8s.control_plane.build`: make a control plane be at hand, once per machine."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.k8s.control_plane.assets import find
from tests.k8s.control_plane.errors import BuildError, NotAtHandError, NotBuiltError
from tests.k8s.control_plane.recipe import TOOLS, built_folder, failure_note, make
from tests.k8s.control_plane.steps import Steps

_LIMIT_S = 1500.0
_WAIT_FOR_ANOTHER_S = 1600.0
_POLL_S = 0.5

_report = functools.partial(print, flush=True)


def build() -> None:
    """Raises BuildError, and notes it for the tests that look for the programs."""
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
    _report(
        f"building a Kubernetes control plane for tests into {built_folder()} (about 5 minutes)"
    )
    log = folder / "build.log"
    steps = Steps(log, _LIMIT_S, _report)
    make(folder, steps)
    steps.report("done")


def made_once(target: Path, make: Callable[[Path], None], wait_s: float) -> bool:
    """Make `target` with `make`, unless it is there; returns whether it was made now.

    `make` gets an empty folder, which becomes `target` when it returns: one that is cut off leaves
    no half. A second maker waits for the first, up to `wait_s`; raises BuildError
    after that.
    """
    if target.is_dir():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(target.name + ".lock"), wait_s):
        if target.is_dir():
            return False
        for left_over in target.parent.glob(f"{target.name}.making-*"):  # its maker was cut off
            shutil.rmtree(left_over, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}.making-"))
        try:
            make(folder)
            folder.rename(target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return True


@contextlib.contextmanager
def _locked(path: Path, wait_s: float) -> Iterator[None]:
    """The kernel lets go of the lock when its holder dies, however it dies."""
    give_up_at = time.monotonic() + wait_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    raise BuildError(f"another build holds {path} for {wait_s:.0f} s") from None
            time.sleep(_POLL_S)
        yield


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
