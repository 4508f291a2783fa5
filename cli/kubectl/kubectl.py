"""kubectl as a child: asked for objects, and held for as long as a port is forwarded."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from cli.kubectl.clusters import Target
from cli.kubectl.errors import ForwardError, KubectlError

_ANSWER_S = 30.0
_FORWARD_S = 30.0
_RUNNING_S = 10  # kubectl itself waits a minute for a pod that there may never be
_END_S = 5.0
_LISTENS = re.compile(rb"Forwarding from (127\.0\.0\.1:[0-9]+)")
_NOT_FOUND = "kubectl is not on PATH"
_INSTEAD = "--address HOST:PORT goes without it, where you reach the cluster's inside"
RIGHTS: Mapping[str, Sequence[str]] = {
    "servingclusters.baton.dev": ("list",),
    "services": ("get",),
    "pods": ("get", "list"),
    "pods/portforward": ("create",),
}
"""What kubectl asks an API server for here: verbs, by resource."""


class Kubectl:
    """`flags`: whose cluster, context and namespace, as kubectl itself takes them."""

    def __init__(self, flags: Sequence[str], program: str = "kubectl") -> None:
        self._command = [program, *flags]

    def serving_clusters(self) -> Sequence[Mapping[str, Any]]:
        """Of the namespace. Raises KubectlError."""
        command = [*self._command, "get", "servingclusters.baton.dev", "--output", "json"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_ANSWER_S, check=False
            )
        except FileNotFoundError as error:
            raise KubectlError(_NOT_FOUND, _INSTEAD) from error
        except subprocess.TimeoutExpired as error:
            message = f"the API server does not answer within {_ANSWER_S:g} s"
            raise KubectlError(message, "`kubectl cluster-info` asks for nothing else") from error
        if done.returncode:
            raise refusal(done.stderr)
        items: list[Mapping[str, Any]] = json.loads(done.stdout)["items"]
        return items

    @contextlib.contextmanager
    def forwarded(self, target: Target) -> Iterator[str]:
        """The address on this machine of a Service's port, for as long as the block; kubectl has
        ended by its end. Raises KubectlError, ForwardError."""
        command = [
            *(*self._command, "--namespace", target.namespace, "port-forward"),
            *("--pod-running-timeout", f"{_RUNNING_S}s", "--address", "127.0.0.1"),
            *(f"service/{target.service}", f":{target.port}"),
        ]
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
                )
            except FileNotFoundError as error:
                raise KubectlError(_NOT_FOUND, _INSTEAD) from error
            try:
                yield _address(process, errors, target)
            finally:
                _end(process)


def refusal(words: str) -> KubectlError:
    """What kubectl said, and what to do about it."""
    lines = [line for line in words.splitlines() if line.strip()]
    said = lines[-1].removeprefix("error: ") if lines else "kubectl failed without a word"
    if "the server doesn't have a resource type" in said:
        hint = "install Baton's chart there, or name another cluster with --context"
    elif "orbidden" in said:
        hint = f"you need to {_rights()}"
    else:
        hint = "`kubectl cluster-info` tells whether kubectl reaches its cluster"
    return KubectlError(said, hint)


def _rights() -> str:
    return ", ".join(f"{' and '.join(verbs)} {what}" for what, verbs in RIGHTS.items())


def _address(process: subprocess.Popen[bytes], errors: IO[bytes], target: Target) -> str:
    """What kubectl says it listens at, once it does."""
    assert process.stdout is not None
    give_up_at = time.monotonic() + _FORWARD_S
    told = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (found := _LISTENS.search(told)) is None:
            if not selector.select(max(0.0, give_up_at - time.monotonic())):
                raise _unreached(target, f"kubectl forwards nothing within {_FORWARD_S:g} s")
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                process.wait(_END_S)
                errors.seek(0)
                raise _unreached(target, refusal(errors.read().decode(errors="replace")).message)
            told += piece
    return found[1].decode()


def _unreached(target: Target, why: str) -> ForwardError:
    hint = f"`kubectl -n {target.namespace} get pods,service` shows whether its pods are ready"
    return ForwardError(f"service/{target.service}: {why}", hint)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
