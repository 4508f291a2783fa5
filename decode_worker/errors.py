"""Why a router cannot attach to a request, or submit one."""

from __future__ import annotations


class NotHereError(LookupError):
    """No such request is known here to this tenant."""


class OtherBodyError(ValueError):
    """The request id runs here with another body, seed or attempt, or for another router."""


class StaleAttemptError(ValueError):
    """This attempt, or a newer one, is known here."""


class NoSessionError(LookupError):
    """The router that attaches has no open session here."""
