"""The command: runs all checks and prints a table or JSON.

Exit codes: 0 no failure (warnings are possible) · 1 a failure · 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.preflight.handoff import Meeting, check_handoff, check_pair, hand_over
from cluster.preflight.machine import (
    Check,
    Wanted,
    as_json,
    as_table,
    check_adapters,
    check_gpu_direct,
    check_gpus,
    check_memory,
    exports_dmabuf,
    has_failed,
)


def all_checks(root: Path, wanted: Wanted, meeting: Meeting | None) -> list[Check]:
    """Run all checks. `root`: the folder of /proc, /sys and /dev. `meeting`: with another pod."""
    gpus = check_gpus(root, wanted)
    device = "cuda" if wanted.num_gpus and not has_failed(gpus) else "cpu"
    return [
        *gpus,
        *check_memory(root, wanted),
        *check_adapters(root, os.environ, wanted),
        *([check_gpu_direct(root, exports_dmabuf())] if wanted.rdma and wanted.num_gpus else []),
        *check_handoff(wanted, device),
        *(check_pair(root, wanted, device, meeting) if meeting else []),
    ]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m cluster.preflight",
        description="Check whether workers can serve here, and say how to fix what is wrong.",
    )
    made.add_argument(
        "--gpus", type=int, default=0, metavar="N", help="number of a worker's ranks on GPUs"
    )
    made.add_argument("--rdma", action="store_true", help="KV is to go over RDMA adapters")
    made.add_argument("--hugepages", action="store_true", help="pods ask for huge pages")
    made.add_argument(
        "--ucx-library",
        default="wheel",
        metavar="LIBRARY",
        help="wheel, system or a path, as spec.advanced.transfer.ucxLibrary (%(default)s)",
    )
    made.add_argument(
        "--node", default="here", metavar="NAME", help="name of this node, for the other one"
    )
    pair = made.add_mutually_exclusive_group()
    pair.add_argument("--listen", type=int, metavar="PORT", help="receive KV of another node")
    pair.add_argument("--connect", metavar="HOST:PORT", help="hand over to the one that listens")
    made.add_argument("--root", type=Path, default=Path("/"), help="folder of proc, sys and dev")
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument("--device", choices=("cpu", "cuda"), help="hand over alone, in its memory")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    wanted = Wanted(options.gpus, options.rdma, options.hugepages, options.ucx_library)
    is_pair = options.listen is not None or options.connect is not None
    meeting = Meeting(options.node, options.listen, options.connect) if is_pair else None
    if options.device is not None:
        hand_over(options.ucx_library, options.device, meeting)
        return 0
    checks = all_checks(options.root, wanted, meeting)
    print(as_json(checks) if options.json else as_table(checks))
    return 1 if has_failed(checks) else 0


if __name__ == "__main__":
    sys.exit(main())
