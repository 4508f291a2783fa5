"""What can go wrong with a control plane."""

from __future__ import annotations


class ControlPlaneError(Exception):
    """Root of this package's errors."""


class NotAtHandError(ControlPlaneError):
    """There is no control plane on this machine; the message says what would bring one."""


class NotBuiltError(NotAtHandError):
    """Nothing was named, and nothing has been built yet: building would help."""


class BuildError(ControlPlaneError):
    """The programs could not be built; the message says why, with what the step printed last."""


class ServerEndedError(ControlPlaneError):
    """One of the servers ended by itself or never got ready; with the last lines of its log."""


class CommandError(ControlPlaneError):
    """kubectl or helm failed; the message is the command and what it wrote to stderr."""
