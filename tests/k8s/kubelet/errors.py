"""What can go wrong between us and this machine.

KubeletError
├── NotPossibleError     this machine does not let us make namespaces
├── KernelError          it did, and refused something later
└── ContainerError       a container cannot be started as it is described
"""

from __future__ import annotations


class KubeletError(Exception):
    """Base of all."""


class NotPossibleError(KubeletError):
    pass


class KernelError(KubeletError):
    pass


class ContainerError(KubeletError):
    pass
