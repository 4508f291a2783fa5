"""A process that writes its name again and again while it leads.

python elector_process.py KUBECONFIG NAMESPACE NAME FILE
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from deploy.controller.kit.connection import Connection
from deploy.controller.kit.election import ElectionSettings, Elector
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key

SETTINGS = ElectionSettings(lease_duration_s=2, renew_deadline_s=1.4, retry_s=0.1)


def main(kubeconfig: str, namespace: str, name: str, path: str) -> None:
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    kube = Kube(Connection.from_kubeconfig(Path(kubeconfig)), "test")
    elector = Elector(kube, Key(namespace, "operator"), name, SETTINGS)
    elector.start(on_gained=lambda: None, on_lost=lambda: None)
    written = os.open(path, os.O_WRONLY | os.O_APPEND)
    while not ending.wait(0.01):
        if elector.is_leading():
            os.write(written, f"{name}\n".encode())
    elector.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
