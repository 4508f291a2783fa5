"""The command: runs all checks and prints a table or JSON.

Exit codes: 0 no failure (warnings are possible) · 1 a failure · 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.preflight.handoff import check_handoff
from cluster.preflight.machine import (
    Check,
    Wanted,
    as_json,
    as_table,
    check_adapters,
    check_gpus,
    check_memory,
    has_failed,
)


def all_checks(root: Path, wanted: Wanted) -> list[Check]:
    """Run all checks. `root`: the folder of /proc, /sys and /dev."""
    gpus = check_gpus(root, wanted)
    device = "cuda" if wanted.num_gpus and not has_failed(gpus) else "cpu"
    return [
        *gpus,
        *check_memory(root, wanted),
        *check_adapters(root, os.environ, wanted),
        *check_handoff(wanted, device),
    ]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m cluster.preflight",
        description="Check whether workers can serve here, and say how to fix what is wrong.",
    )
    made.add_argument("--gpus", type=int, default=0, metavar="N", help="a worker's ranks")
    made.add_argument("--rdma", action="store_true", help="KV is to go over RDMA adapters")
    made.add_argument("--hugepages", action="store_true", help="pods ask for huge pages")
    made.add_argument(
        "--ucx-library",
        default="wheel",
        metavar="LIBRARY",
        help="wheel, system or a path, as spec.transfer.ucxLibrary (%(default)s)",
    )
    made.add_argument("--root", type=Path, default=Path("/"), help="of proc, sys and dev")
    made.add_argument("--json", action="store_true", help="for programs")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    wanted = Wanted(options.gpus, options.rdma, options.hugepages, options.ucx_library)
    checks = all_checks(options.root, wanted)
    print(as_json(checks) if options.json else as_table(checks))
    return 1 if has_failed(checks) else 0


if __name__ == "__main__":
    sys.exit(main())
