"""Checks of the UCX transport over TCP alone; UCX reads UCX_TLS once, so: a process of its own.

Arguments: the check, and which libucp. Prints one line of JSON; see `test_transport_over_tcp.py`.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import queue
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ways import runs_between

from baton.config.transfer import TransferConfig
from kv_transfer.transport import FlushResult, PutBatch
from kv_transfer.transports.ucx.transport import UcxTransport

CONFIG = TransferConfig(ucx_library=sys.argv[2] if len(sys.argv) > 2 else "wheel")
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

    runs = runs_between(memory.regions, regions, CHUNK)
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


def send(pipe: Connection) -> None:
    transport, memory = opened(CHUNK)
    memory.buffer[:] = 1
    transport.start(ignore, ignore)
    while True:
        address, regions = pipe.recv()
        peer = transport.connect(address)
        transport.put(peer, PutBatch(runs_between(memory.regions, regions, CHUNK)), ignore)
        transport.flush(peer, lambda result: pipe.send(result.error))


def revoked_puts() -> dict[str, Any]:
    """Does what waits in a socket land once puts are revoked, and what is put to the new address?
    The sender lives on."""
    pipe, there = (context := multiprocessing.get_context("spawn")).Pipe()
    context.Process(target=send, args=(there,), daemon=True).start()
    transport, memory = opened(CHUNK)
    transport.start(ignore, ignore)
    pipe.send((transport.put_address, memory.regions))
    assert pipe.recv() is None
    entered, goes_on = threading.Semaphore(0), threading.Semaphore(0)
    revoked = threading.Event()

    def hold(_: FlushResult) -> None:
        entered.release()
        goes_on.acquire()

    own = transport.connect(transport.address)
    transport.flush(own, hold)  # the progress thread is busy
    entered.acquire(timeout=20)
    transport.flush(own, hold)
    transport.revoke_puts(revoked.set)  # in the same turn: nothing is read between the two
    goes_on.release()
    entered.acquire(timeout=20)
    memory.buffer[:] = 0
    pipe.send((transport.put_address, memory.regions))
    while not (num_unread_bytes := unread_bytes()) > CHUNK // 100:
        time.sleep(0.005)
    goes_on.release()
    assert revoked.wait(20)
    former = pipe.recv(), bool(memory.buffer.any())
    pipe.send((transport.put_address, memory.regions))
    fresh = pipe.recv(), bool(memory.buffer.all())
    return {"num_unread_bytes": num_unread_bytes, "former": former, "fresh": fresh}


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


def unread_bytes() -> int:
    """What this process's sockets have received and nobody has read."""
    found = 0
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                found += struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]
        except OSError:
            continue  # a listening socket, or one closed in the meantime
    return found


def main(check: str) -> None:
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "flush": flushes_of_a_lost_peer,
        "connections": many_connections,
        "revoked": revoked_puts,
    }
    print(json.dumps(checks[check]()), flush=True)
    os._exit(0)  # a progress thread may be held for good


if __name__ == "__main__":
    main(sys.argv[1])
