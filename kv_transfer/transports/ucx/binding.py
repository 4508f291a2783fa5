"""The part of libucp's C interface that Baton uses: structures, prototypes, loading.

Structures are as in UCX 1.21. Older ones are shorter at the tail, and field masks say which members
are set, so the longer form is safe down to UCX 1.13.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_int, c_int8, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from baton.config.transfer import TransferConfig
from kv_transfer.errors import TransportError

API_MAJOR, API_MINOR = 1, 21
OK, IN_PROGRESS = 0, 1
NO_SHARED_SEGMENT = -17

FEATURE_RMA, FEATURE_WAKEUP, FEATURE_AM = 1 << 1, 1 << 4, 1 << 6
THREAD_MODE_SERIALIZED = 1
MEM_MAP_ALLOCATE, MEM_MAP_FIXED = 1 << 1, 1 << 2
ERROR_MODE_PEER = 1
EP_CLOSE_FORCE = 1
AM_WHOLE_MESSAGE = 1
AM_SEND_EAGER = 1 << 1
MEMORY_HOST, MEMORY_CUDA = 0, 1
OP_ATTR_FLAGS = 1 << 4

Status = c_int8  # a packed enum: one signed byte; the rest of the register is undefined
ErrorCallback = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, Status)
MessageCallback = ctypes.CFUNCTYPE(
    Status, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p
)


class ContextParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64),  # 1: features
        ("features", c_uint64),
        ("unused", c_uint64 * 9),
    )


class WorkerParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64),  # 1: thread_mode
        ("thread_mode", c_int),
        ("unused", c_uint64 * 23),
    )


class MemMapParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64),  # 1: address, 2: length, 4: flags, 16: memory_type
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint32),
        ("protection", c_uint32),
        ("memory_type", c_int),
        ("unused", c_uint64),
    )


class ContextAttributes(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64),  # 4: memory_types
        ("request_size", c_size_t),
        ("thread_mode", c_int),
        ("memory_types", c_uint64),  # a bit for each
        ("unused", c_uint64 * 8),
    )


class EndpointParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64),  # 1: address, 2: error_mode, 4: error handler
        ("address", c_void_p),
        ("error_mode", c_int),
        ("error_callback", ErrorCallback),
        ("error_argument", c_void_p),
        ("unused", c_uint64 * 8),
    )


class MessageHandlerParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64),  # 1: id, 2: flags, 4: callback
        ("id", c_uint32),
        ("flags", c_uint32),
        ("callback", MessageCallback),
        ("argument", c_void_p),
    )


class RequestParams(ctypes.Structure):
    _fields_ = (
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("unused", c_uint64 * 7),
        ("memory_handle", c_void_p),
    )


_SIZES = {
    ContextParams: 88,
    WorkerParams: 200,
    MemMapParams: 48,
    ContextAttributes: 96,
    EndpointParams: 104,
    MessageHandlerParams: 32,
    RequestParams: 72,
}
assert all(ctypes.sizeof(struct) == size for struct, size in _SIZES.items())

_PROTOTYPES: dict[str, tuple[Any, ...]] = {  # name: (result, *arguments)
    "ucp_get_version": (None, POINTER(c_uint32), POINTER(c_uint32), POINTER(c_uint32)),
    "ucp_config_read": (Status, c_void_p, c_void_p, POINTER(c_void_p)),
    "ucp_config_release": (None, c_void_p),
    "ucp_init_version": (Status, c_uint32, c_uint32, c_void_p, c_void_p, POINTER(c_void_p)),
    "ucp_context_query": (Status, c_void_p, c_void_p),
    "ucp_context_print_info": (None, c_void_p, c_void_p),
    "ucp_cleanup": (None, c_void_p),
    "ucp_worker_create": (Status, c_void_p, c_void_p, POINTER(c_void_p)),
    "ucp_worker_destroy": (None, c_void_p),
    "ucp_worker_get_address": (Status, c_void_p, POINTER(c_void_p), POINTER(c_size_t)),
    "ucp_worker_release_address": (None, c_void_p, c_void_p),
    "ucp_worker_progress": (c_uint32, c_void_p),
    "ucp_worker_get_efd": (Status, c_void_p, POINTER(c_int)),
    "ucp_worker_signal": (Status, c_void_p),
    "ucp_worker_set_am_recv_handler": (Status, c_void_p, c_void_p),
    "ucp_mem_map": (Status, c_void_p, c_void_p, POINTER(c_void_p)),
    "ucp_mem_unmap": (Status, c_void_p, c_void_p),
    "ucp_rkey_pack": (Status, c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_size_t)),
    "ucp_rkey_buffer_release": (None, c_void_p),
    "ucp_ep_create": (Status, c_void_p, c_void_p, POINTER(c_void_p)),
    "ucp_ep_rkey_unpack": (Status, c_void_p, c_void_p, POINTER(c_void_p)),
    "ucp_rkey_destroy": (None, c_void_p),
    "ucp_ep_print_info": (None, c_void_p, c_void_p),
    "ucp_rkey_ptr": (Status, c_void_p, c_uint64, POINTER(c_void_p)),
    "ucp_ep_flush_nbx": (c_void_p, c_void_p, c_void_p),
    "ucp_ep_close_nbx": (c_void_p, c_void_p, c_void_p),
    "ucp_am_send_nbx": (
        c_void_p,
        c_void_p,
        c_uint32,
        c_void_p,
        c_size_t,
        c_void_p,
        c_size_t,
        c_void_p,
    ),
    "ucp_request_check_status": (Status, c_void_p),
    "ucp_request_free": (None, c_void_p),
    "ucs_status_string": (ctypes.c_char_p, Status),
}


def pointer_status(pointer: int | None) -> int:
    """Decode a ucs_status_ptr_t: NULL means done, the last 100 addresses are errors."""
    if pointer is None:
        return OK
    return pointer - 2**64 if pointer >= 2**64 - 100 else IN_PROGRESS


class Ucp:
    """A loaded libucp. Its functions are attributes, by name."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, (result, *arguments) in _PROTOTYPES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        major, minor, patch = c_uint32(), c_uint32(), c_uint32()
        library.ucp_get_version(byref(major), byref(minor), byref(patch))
        self.version = (major.value, minor.value, patch.value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def text(self, status: int) -> str:
        message: bytes = self._library.ucs_status_string(status)
        return f"{message.decode()} ({status})"

    def check(self, status: int, what: str) -> None:
        """Raise TransportError on a negative ucs_status_t."""
        if status < 0:
            raise TransportError(f"{what}: {self.text(status)}", status)

    def address_of(self, name: str) -> int:
        """Address of a function, for compiled code."""
        address = ctypes.cast(getattr(self._library, name), c_void_p).value
        assert address is not None
        return address


def load(config: TransferConfig) -> Ucp:
    """Load the libucp that the configuration names. Raises TransportError if there is none.

    UCX reads its settings from the environment when it is loaded. Without UCX_MM_ERROR_HANDLING,
    endpoints with error reporting silently use TCP instead of shared memory. If only one of two
    processes sets it, the two choose different transports.
    """
    os.environ["UCX_MM_ERROR_HANDLING"] = "y"
    os.environ.setdefault("UCX_KEEPALIVE_INTERVAL", f"{max(1, round(config.keepalive_s * 1000))}ms")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    if config.net_devices:
        os.environ.setdefault("UCX_NET_DEVICES", config.net_devices)
    try:
        return Ucp(_open(config.ucx_library))
    except (OSError, ImportError) as error:
        raise TransportError(f"cannot load libucp ({config.ucx_library}): {error}") from error


def _open(library: str) -> ctypes.CDLL:
    # CDLL, never PyDLL: UCX calls back while it holds its own lock, so the GIL must be free.
    if library == "system":
        return ctypes.CDLL("libucp.so.0")
    if library != "wheel":
        return ctypes.CDLL(library)
    import libucx

    loaded: ctypes.CDLL = libucx.load_library()[-1]
    return loaded
