"""A program that answers as kubectl does to `get` and `port-forward`, where no kubelet forwards.

FOLDER in its environment holds `clusters.json`, what `get` prints, and `secret.json`, what it
prints of a Secret (else nobody may read one); `pods.json`, what it prints of pods, and `log`, what
each has said; `upstream`, where a forwarded port leads, or
`refusal`, what kubectl says instead (`refusal-NAME` for one Service alone). Into `pid` it writes
who forwards, into `asked` every command line.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path


def pump(source: socket.socket, sink: socket.socket) -> None:
    while piece := source.recv(65536):
        sink.sendall(piece)
    sink.shutdown(socket.SHUT_WR)


def forward(upstream: str) -> None:
    host, _, port = upstream.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(f"Forwarding from 127.0.0.1:{server.getsockname()[1]} -> 7101", flush=True)
        while True:
            client, _ = server.accept()
            there = socket.create_connection((host, int(port)))
            print("Handling connection for 7101", flush=True)
            for source, sink in ((client, there), (there, client)):
                threading.Thread(target=pump, args=(source, sink), daemon=True).start()


def main() -> None:
    folder = Path(os.environ["FOLDER"])
    with (folder / "asked").open("a") as asked:
        asked.write(" ".join(sys.argv[1:]) + "\n")
    if "secret" in sys.argv and not (folder / "secret.json").exists():
        sys.exit("Error from server (Forbidden): secrets is forbidden")
    if "secret" in sys.argv:
        print((folder / "secret.json").read_text())
        return
    if "pods" in sys.argv or "logs" in sys.argv:
        print((folder / ("log" if "logs" in sys.argv else "pods.json")).read_text())
        return
    if "get" in sys.argv:
        print((folder / "clusters.json").read_text())
        return
    (folder / "pid").write_text(str(os.getpid()))
    service = next(word for word in sys.argv if word.startswith("service/"))
    for refusal in ("refusal", f"refusal-{service.removeprefix('service/')}"):
        if (folder / refusal).exists():
            sys.exit((folder / refusal).read_text())
    forward((folder / "upstream").read_text())


if __name__ == "__main__":
    main()
