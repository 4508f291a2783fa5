"""Which transports UCX has chosen between two processes, and what a process's end proves over them.

Over shared memory a put is a copy made by the writer's own threads: none is left when the process
is gone. Over TCP the kernel delivers what it has taken, and the receiver's progress thread writes
it, whenever that comes to read it. What the two ends choose is alike: an address lists the
transports that its process has, and both ends weigh what both list.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from ctypes import byref, c_size_t, c_void_p
from pathlib import Path

from kv_transfer.ucx.binding import Ucp

SHARED_MEMORY = frozenset({"sysv", "posix", "xpmem", "self"})
CUDA_COPIES = frozenset({"cuda_ipc", "cuda_copy", "gdr_copy"})

_RESOURCE = re.compile(r"resource \d+ .* -- (\w+)/")
_LANE = re.compile(r"lane\[\d+\]: +\d+:(\w+)/")
_libc = ctypes.CDLL(None)
_libc.open_memstream.restype = c_void_p
_libc.fclose.argtypes = [c_void_p]
_libc.free.argtypes = [c_void_p]


def lanes_of(ucp: Ucp, endpoint: int) -> frozenset[str]:
    """The transports of an endpoint's lanes, "?" for one that is not told.

    From the endpoint's printed description: `ucp_ep_query` does not tell it in UCX 1.13.
    """
    lines = _printed(ucp.ucp_ep_print_info, endpoint)
    found = [_LANE.search(line) for line in lines if "lane[" in line]
    return frozenset(lane[1] if lane else "?" for lane in found) or frozenset({"?"})


def transports_of(ucp: Ucp, context: int) -> frozenset[str]:
    """The transports that this process could take, with the devices and settings that it has."""
    found = (_RESOURCE.search(line) for line in _printed(ucp.ucp_context_print_info, context))
    return frozenset(resource[1] for resource in found if resource)


def _printed(write: Callable[[int, int], None], of: int) -> list[str]:
    """The lines that one of UCX's functions prints into a stream; none where there is no memory."""
    text, size = c_void_p(), c_size_t()
    stream = _libc.open_memstream(byref(text), byref(size))
    if not stream:
        return []
    write(of, stream)
    _libc.fclose(stream)
    lines = ctypes.string_at(text.value or 0, size.value).decode(errors="replace").splitlines()
    _libc.free(text)
    return lines


def end_with_their_process(lanes: frozenset[str]) -> bool:
    """Whether whatever a process has put over these lanes is over once the process is."""
    return lanes <= SHARED_MEMORY | CUDA_COPIES


def is_shared(address: int) -> bool:
    """Whether this address lies in a mapping that other processes can have too."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions = line.split()[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return permissions.endswith("s")
    return False
