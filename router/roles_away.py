"""The roles that nobody serves now, but will again: the registry knows which."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.router import LocalPrefill


@dataclass(frozen=True)
class RolesAway:
    prefill: bool = False
    decode: bool = False

    def hold(self, local_prefill: LocalPrefill) -> bool:
        """Whether a request is to wait, up to its own deadline: a role that it cannot do without
        is away."""
        return self.decode or (local_prefill == "never" and self.prefill)
