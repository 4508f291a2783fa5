"""The engine's errors.

EngineError
├── InvalidRequestError   the caller's mistake; names the field
├── UnknownRequestError   nothing is known, or reserved, under this request id
└── EngineStoppedError    the engine's thread has ended, or a step failed
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
