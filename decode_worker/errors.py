"""Why a router cannot attach to a request."""

from __future__ import annotations


class NotHereError(LookupError):
    """No such request is known here to this tenant."""


class OtherBodyError(ValueError):
    """The request id runs here with another body or seed."""


class NoSessionError(LookupError):
    """The router that attaches has no open session here."""
