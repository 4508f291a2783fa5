"""What can go wrong before a ServingCluster is reached.

PluginError
├── KubectlError      kubectl is missing, or says no
├── ChoiceError       no ServingCluster there, or several
└── ForwardError      kubectl reaches none of its pods
"""

from __future__ import annotations


class PluginError(Exception):
    def __init__(self, message: str, hint: str) -> None:
        """`hint`: what to do next, in a line."""
        super().__init__(message)
        self.message, self.hint = message, hint


class KubectlError(PluginError):
    pass


class ChoiceError(PluginError):
    pass


class ForwardError(PluginError):
    pass
