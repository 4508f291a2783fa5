"""One of two processes that move KV to each other; prints what it is to be reached by, reads what
the other one is, writes to it for longer than UCX takes to ask whether it lives, prints the errors.
"""

from __future__ import annotations

import base64
import pickle
import queue
import sys
import time
from array import array

from baton.config.transfer import TransferConfig
from kv_transfer.transport import BlockAddresses, CopyPath, FlushResult, PutBatch, Runs
from kv_transfer.transports.ucx.transport import UcxTransport

_BYTES = 1 << 20
_KEEPALIVE_S = 0.5
_WRITES_FOR_S = 4 * _KEEPALIVE_S


def main() -> None:
    transport = UcxTransport(TransferConfig(keepalive_s=_KEEPALIVE_S))
    memory = transport.allocate(1, _BYTES, 1)
    lost: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    transport.start(lambda _message: None, lost.put)
    told = base64.b64encode(pickle.dumps((transport.address, memory.regions))).decode()
    print(told, flush=True)
    address, regions = pickle.loads(base64.b64decode(input()))
    (here,), (there,) = memory.regions, regions
    source, target = (
        BlockAddresses(array("Q", [region.base_address]), 1, array("Q", [0]), array("Q", [_BYTES]))
        for region in (here, there)
    )
    runs = Runs(
        CopyPath(source, target, array("Q", [_BYTES]), (there.rkey,)),
        array("Q", [0]),
        array("Q", [0]),
    )
    peer = transport.connect(address)
    errors: list[str] = []
    ends_at = time.monotonic() + _WRITES_FOR_S
    while time.monotonic() < ends_at and not errors:
        flushed: queue.SimpleQueue[FlushResult] = queue.SimpleQueue()
        transport.put(peer, PutBatch(runs), errors.append)
        transport.flush(peer, flushed.put)
        error = flushed.get(timeout=20).error
        errors += [error] if error else []
        time.sleep(_KEEPALIVE_S / 5)
    print("; ".join(errors) or "wrote", flush=True)
    sys.stdin.readline()  # until the other one has written, too


if __name__ == "__main__":
    main()
