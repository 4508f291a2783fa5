"""How a process that serves uses Python's interpreter."""

import gc
import sys


def freeze_heap() -> None:
    """Leave what start-up made out of later collections. Otherwise each full one scans it, and
    stalls every stream for 30 ms in a router and 0.1 s in a worker."""
    gc.collect()
    gc.freeze()


def share_interpreter() -> None:
    """Have threads hand on the interpreter's lock after 0.2 ms. A token passes an engine's thread,
    the event loop and gRPC's threads, a request the tokenizer's; each pass may cost one interval.
    The default of 5 ms would be several decode steps."""
    sys.setswitchinterval(0.0002)
