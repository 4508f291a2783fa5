"""The table of transports."""

from __future__ import annotations

from baton.config.transfer import TransferConfig
from kv_transfer.transport import Transport


def make_transport(config: TransferConfig) -> Transport:
    """Make the transport that the configuration names. Raises TransportError."""
    if config.transport == "memory":
        from kv_transfer.transports.memory_transport import MemoryNetwork

        return MemoryNetwork.shared().join()
    from kv_transfer.transports.ucx.transport import UcxTransport

    return UcxTransport(config)
