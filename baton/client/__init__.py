"""Talk to Baton: `Client` for ordinary code, `AsyncClient` for asyncio."""

from baton.client.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
