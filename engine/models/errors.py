"""What can be wrong with a model folder.

ModelError
├── UnsupportedModelError    an architecture, or a setting of it, that the decoder does not have
├── CheckpointError          a file or tensor is missing, extra, misshapen, truncated or corrupt
└── ShardingError            the model cannot be split over this many ranks
"""

from __future__ import annotations


class ModelError(Exception):
    """Base of all; the message names the folder's file, tensor or key."""


class UnsupportedModelError(ModelError):
    """A model that this engine would compute wrongly, so it refuses it."""


class CheckpointError(ModelError):
    """A broken model folder."""


class ShardingError(ModelError):
    """Heads or widths that do not divide by the number of tensor-parallel ranks."""
