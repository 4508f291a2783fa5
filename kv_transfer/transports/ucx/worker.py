"""A UCX worker. Each process has two: one for messages and its own puts, and an inlet.

Peers' puts arrive through the inlet. One over TCP is a message that the inlet's progress carries
out; one over RDMA needs a queue pair of the inlet. So once it is destroyed, nothing that was put
through it can land any more, whatever the peers do. Peers that write shared memory themselves need
the inlet only to connect.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_void_p

from kv_transfer.transports.ucx.binding import THREAD_MODE_SERIALIZED, Ucp, WorkerParams


class UcxWorker:
    """A UCX worker, which one thread at a time may use. `descriptor` becomes readable when it has
    work."""

    def __init__(self, ucp: Ucp, context: int) -> None:
        """Create the worker. Raises TransportError."""
        self._ucp = ucp
        handle, descriptor = c_void_p(), c_int()
        params = WorkerParams(field_mask=1, thread_mode=THREAD_MODE_SERIALIZED)
        ucp.check(ucp.ucp_worker_create(context, byref(params), byref(handle)), "ucp_worker_create")
        assert handle.value is not None
        self.handle = handle.value
        ucp.check(ucp.ucp_worker_get_efd(self.handle, byref(descriptor)), "ucp_worker_get_efd")
        self.descriptor = descriptor.value
        pointer, length = c_void_p(), c_size_t()
        status = ucp.ucp_worker_get_address(self.handle, byref(pointer), byref(length))
        ucp.check(status, "ucp_worker_get_address")
        self.address = ctypes.string_at(pointer.value or 0, length.value)
        ucp.ucp_worker_release_address(self.handle, pointer)

    def progress(self) -> bool:
        """Do what is pending. False: nothing was."""
        return bool(self._ucp.ucp_worker_progress(self.handle))

    def signal(self) -> None:
        """Make its descriptor readable. Any thread."""
        self._ucp.ucp_worker_signal(self.handle)

    def destroy(self) -> None:
        """Close its sockets and queue pairs; what nobody has read of them is dropped."""
        self._ucp.ucp_worker_destroy(self.handle)
