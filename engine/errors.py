"""The engine's errors.

EngineError
├── InvalidRequestError   the caller's mistake; names the field
├── UnknownRequestError   nothing is known, or reserved, under this request id
└── EngineStoppedError    the engine's thread has ended, or a step failed

ModelError                  the model folder is wrong; names its file, tensor or key
├── UnsupportedModelError   an architecture, or a setting of it, that the decoder does not have
├── CheckpointError         a file or tensor is missing, extra, misshapen, truncated or corrupt
└── ShardingError           the model cannot be split over this many ranks
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all."""


class InvalidRequestError(EngineError, ValueError):
    """`field` is the request's field that is wrong: "prompt", "token_ids" or a sampling field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


class UnknownRequestError(EngineError, KeyError):
    pass


class EngineStoppedError(EngineError):
    pass


class ModelError(Exception):
    """Base of all; the message names the folder's file, tensor or key."""


class UnsupportedModelError(ModelError):
    """A model that this engine would compute wrongly, so it refuses it."""


class CheckpointError(ModelError):
    """A broken model folder."""


class ShardingError(ModelError):
    """Heads or widths that do not divide by the number of tensor-parallel ranks."""
