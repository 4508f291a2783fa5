"""Why a replica is not there.

ReplicaError
  PodLostError
"""

from __future__ import annotations


class ReplicaError(RuntimeError):
    """A replica could not be started."""


class PodLostError(ReplicaError):
    """The pod went away before the ranks were launched in it."""
