"""Why a replica is not there; why nothing is known of a machine's end.

ReplicaError
  PodLostError
MetadataError
"""

from __future__ import annotations


class ReplicaError(RuntimeError):
    """A replica could not be started."""


class PodLostError(ReplicaError):
    """The pod went away before the ranks were launched in it."""


class MetadataError(RuntimeError):
    """A cloud's metadata service has not answered what it was asked."""
