"""The progress thread's command queue, and how its puts are posted.

Compiled C reads and posts from it without the GIL, so a thread that holds the GIL for long delays
no put.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import POINTER, addressof, byref, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

from baton.native_build import NativeBuildError, Recipe, build
from kv_transfer.errors import TransportError
from kv_transfer.transport import OnFailed, PutBatch
from kv_transfer.transports.ucx.binding import Status, Ucp
from kv_transfer.transports.ucx.worker import UcxWorker

POST_LOOP = Recipe(
    "post_loop",
    (Path(__file__).with_name("post_loop.c"),),
    ("-O2", "-std=c11", "-shared", "-fPIC"),
    ("cc", "gcc", "clang"),
)


class PutTarget(ctypes.Structure):
    """Where puts go: libucp handles in a form that C reads. The progress thread opens and
    closes it; nothing is posted before or after."""

    _fields_ = (
        ("endpoint", c_void_p),
        ("memory_handles_at", c_void_p),
        ("rkeys_at", c_void_p),
        ("busy_ns", c_uint64),
    )
    endpoint: int | None
    busy_ns: int

    def open(self, endpoint: int, memory_handles: Sequence[int], rkeys: Sequence[int]) -> None:
        """`memory_handles` by source region, `rkeys` by target region."""
        self.memory_handles = (c_void_p * len(memory_handles))(*memory_handles)
        self.rkeys = (c_void_p * len(rkeys))(*rkeys)
        self.memory_handles_at = addressof(self.memory_handles)
        self.rkeys_at = addressof(self.rkeys)
        self.endpoint = endpoint

    def close(self) -> None:
        self.endpoint = None

    @property
    def is_open(self) -> bool:
        return self.endpoint is not None

    def take_busy_s(self) -> float:
        """Seconds spent posting since the last call."""
        busy_ns, self.busy_ns = self.busy_ns, 0
        return busy_ns / 1e9


@dataclass(frozen=True, eq=False)
class Put:
    target: PutTarget
    batch: PutBatch
    on_failed: OnFailed
    open_target: Callable[[], str | None]
    """Open the target if possible. Returns why its keys were refused, or None."""


Command = Callable[[], None] | Put


class _Api(ctypes.Structure):
    _fields_ = (
        ("put", c_void_p),
        ("progress", c_void_p),
        ("release", c_void_p),
        ("arm", c_void_p),
        ("worker", c_void_p),
        ("descriptor", c_int),
    )


class _Entry(ctypes.Structure):
    _fields_ = (
        ("next", c_void_p),
        ("target", c_void_p),
        ("path", c_void_p),
        ("sources", c_void_p),
        ("targets", c_void_p),
        ("source_offset", c_uint64),
        ("target_offset", c_uint64),
        ("num_blocks", c_size_t),
    )


class _Queue(ctypes.Structure):
    _fields_ = (
        ("before", c_void_p),
        ("last", c_void_p),
        ("asleep", c_int),
        ("status", c_int),
        ("num_posted", c_uint64),
    )


class CommandQueue:
    """C posts, also while it waits in `sleep`; `post` returns a failure.

    Keeps the commands twice, in one order: here, and as a list that C reads without the GIL. Any
    thread may `add`. All other methods belong to the progress thread."""

    def __init__(self, ucp: Ucp, worker: UcxWorker, library: str) -> None:
        """`library`: the `post_library`."""
        # Adding keeps the GIL (PyDLL) because it never waits; posting and waiting release it.
        quick, slow = ctypes.PyDLL(library), ctypes.CDLL(library)
        self._c_add, self._c_take = quick.baton_add, quick.baton_take
        self._c_post, self._c_sleep = slow.baton_post, slow.baton_sleep
        self._c_add.argtypes = [POINTER(_Queue), POINTER(_Entry)]
        self._c_take.restype, self._c_take.argtypes = None, [POINTER(_Queue)]
        self._c_post.restype, self._c_post.argtypes = None, [POINTER(_Queue), POINTER(_Api)]
        self._c_sleep.restype = Status
        self._c_sleep.argtypes = [POINTER(_Queue), POINTER(_Api), c_void_p, c_int]
        names = ("ucp_put_nbx", "ucp_worker_progress", "ucp_request_free", "ucp_worker_arm")
        self._api = _Api(*map(ucp.address_of, names), worker.handle, worker.descriptor)
        self._before = _Entry()  # the last one taken: C follows its `next`
        address = addressof(self._before)
        self._queue = _Queue(before=address, last=address)
        self._commands: deque[Command] = deque()
        self._entries: deque[_Entry] = deque()  # of the commands
        self._lock = threading.Lock()  # keeps the commands and C's list equal
        self.num_taken = 0
        """Commands that have left the queue: taken or posted."""

    def __len__(self) -> int:
        return len(self._commands)

    @property
    def first(self) -> Command:
        """The first command. The queue must not be empty."""
        return self._commands[0]

    def add(self, command: Command) -> bool:
        """Append a command. True: the progress thread sleeps, and this caller must signal it."""
        entry = _entry(command.target, command.batch) if isinstance(command, Put) else _Entry()
        with self._lock:
            self._commands.append(command)
            self._entries.append(entry)
            return bool(self._c_add(byref(self._queue), byref(entry)))

    def take(self) -> Command:
        """Remove and return the first command."""
        with self._lock:
            self._c_take(byref(self._queue))
            return self._left()

    def post(self) -> int:
        """Post and remove puts from the front while their targets are open. Returns 0, or the
        negative status of a failed put, which stays first."""
        self._c_post(byref(self._queue), byref(self._api))
        return self._posted()

    def sleep(self, inlet: UcxWorker) -> int:
        """Wait for a peer's event, also at the inlet, or a signal, unless there is a command.
        Returns the wait's status."""
        queue, api = byref(self._queue), byref(self._api)
        status: int = self._c_sleep(queue, api, inlet.handle, inlet.descriptor)
        self._posted()
        return status

    def _posted(self) -> int:
        for _ in range(self._queue.num_posted):
            self._left()
        self._queue.num_posted = 0
        status: int = self._queue.status
        return status

    def _left(self) -> Command:
        """Book that the first command has left C's list."""
        self.num_taken += 1
        self._before = self._entries.popleft()
        return self._commands.popleft()


def _entry(target: PutTarget, batch: PutBatch) -> _Entry:
    runs = batch.runs
    return _Entry(
        None,
        addressof(target),
        *(words.buffer_info()[0] for words in (runs.path.packed, runs.sources, runs.targets)),
        batch.source_offset,
        batch.target_offset,
        runs.num_blocks,
    )


def post_library() -> str:
    """Return the path of the compiled loop. Raises TransportError where it cannot be built."""
    try:
        return str(build(POST_LOOP))
    except NativeBuildError as error:
        raise TransportError(f"the loop that posts puts cannot be built: {error}") from error
