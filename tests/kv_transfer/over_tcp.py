"""Two checks of the UCX transport over TCP alone; UCX reads UCX_TLS once, so: a process of its own.

Prints one line of JSON; see `test_transport_over_tcp.py`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kv_transfer.config import TransferConfig
from kv_transfer.transport import FlushResult, PutBatch, Runs
from kv_transfer.ucx.transport import UcxTransport

CONFIG = TransferConfig()
CHUNK, NUM_CHUNKS = 1 << 20, 48  # more than two sockets hold


def ignore(_: object) -> None:
    pass


def opened(num_bytes: int) -> tuple[UcxTransport, Any]:
    transport = UcxTransport(CONFIG)
    memory = transport.allocate(1, num_bytes, 1)
    return transport, memory


def receive(pipe: Connection) -> None:
    transport, memory = opened(CHUNK * NUM_CHUNKS)
    transport.start(ignore, ignore)
    pipe.send((transport.address, memory.regions))
    pipe.recv()


def flushes_of_a_lost_peer() -> dict[str, Any]:
    """Is the endpoint closed when a flush that was waiting, and one that comes later, answer?"""
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    receiver = context.Process(target=receive, args=(there,), daemon=True)
    receiver.start()
    address, regions = pipe.recv()
    lost: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    flushed: queue.SimpleQueue[tuple[bool, str | None]] = queue.SimpleQueue()
    transport, memory = opened(CHUNK * NUM_CHUNKS)
    transport.start(ignore, lost.put)
    peer = transport.connect(address)

    def on_flushed(result: FlushResult) -> None:
        flushed.put((peer.is_closed, result.error))

    runs = Runs(
        sources=np.array([memory.regions[0].base_address], np.uint64),
        targets=np.array([regions[0].base_address], np.uint64),
        lengths=np.array([CHUNK], np.uint64),
        source_regions=np.zeros(1, np.int64),
        target_regions=np.zeros(1, np.int64),
        rkeys=(regions[0].rkey,),
    )
    transport.put(peer, PutBatch(runs), ignore)
    transport.flush(peer, on_flushed)
    working = flushed.get(timeout=20)
    assert receiver.pid is not None
    os.kill(receiver.pid, signal.SIGSTOP)  # nobody reads: the sockets fill, the rest waits here
    for chunk in range(NUM_CHUNKS):
        transport.put(peer, PutBatch(runs, chunk * CHUNK, chunk * CHUNK), ignore)
    transport.flush(peer, on_flushed)
    receiver.kill()
    receiver.join()
    lost.get(timeout=20)
    transport.flush(peer, on_flushed)
    answers = [flushed.get(timeout=20) for _ in range(2)]
    transport.close()
    return {"working": working, "answers": answers}


def many_connections() -> dict[str, Any]:
    """Peers come and go; what is left of them here, after the first and after twenty more?"""
    lost: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    transport = UcxTransport(CONFIG)
    transport.start(ignore, lost.put)

    def meet_and_lose() -> tuple[int, int]:
        arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        other = UcxTransport(CONFIG)
        other.start(arrived.put, ignore)
        transport.send(transport.connect(other.address), b"hello")
        arrived.get(timeout=20)
        other.close()
        lost.get(timeout=20)
        flushed: queue.SimpleQueue[FlushResult] = queue.SimpleQueue()
        transport.flush(transport.connect(transport.address), flushed.put)
        flushed.get(timeout=20)
        return transport.num_peers, len(os.listdir("/proc/self/fd"))

    first = [meet_and_lose() for _ in range(2)][-1]
    last = [meet_and_lose() for _ in range(20)][-1]
    transport.close()
    return {"first": first, "last": last}


if __name__ == "__main__":
    print(
        json.dumps(
            {"flush": flushes_of_a_lost_peer, "connections": many_connections}[sys.argv[1]]()
        )
    )
