"""`kubectl baton status|top|drain|explain`: finds a ServingCluster, and runs that `baton` command.

kubectl runs `kubectl-baton` as a plugin. Exit codes are those of `baton`, and 3 where no
ServingCluster is found or reached.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from cli import main as cli
from cli.kubectl.clusters import chosen, target
from cli.kubectl.errors import PluginError
from cli.kubectl.kubectl import Kubectl

_PROGRAM = "kubectl baton"
_COMMANDS = {
    "status": ("control", "pools, workers, load, cache, queue"),
    "top": ("control", "how busy pools and workers are; --watch goes on"),
    "drain": ("control", "WORKER: let it finish what it runs, then leave"),
    "explain": ("grpc", "PROMPT: where it would run, and at what cost"),
}
"""What each asks, an endpoint of the cluster's status, and what it does."""
_OPTIONS = {"control": "--control", "grpc": "--router"}
"""Of `baton`, by endpoint."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if options.command is None:
        parser.print_help()
        return 0 if options.help else cli.EXIT_USAGE
    if options.help:
        return cli.main([options.command, "--help"], prog=_PROGRAM)
    endpoint, _ = _COMMANDS[options.command]
    try:
        with _ending_what_was_started(), _reached(options, endpoint) as where:
            command = [options.command, *where, *rest]
            return cli.main(command, prog=_PROGRAM, unreachable=_hint(options))
    except PluginError as error:
        print(f"{_PROGRAM}: {error.message}\n  {error.hint}", file=sys.stderr)
        return cli.EXIT_UNAVAILABLE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return cli.EXIT_INTERRUPTED


@contextlib.contextmanager
def _ending_what_was_started() -> Iterator[None]:
    """SIGTERM leaves by way of every block that ends something."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _reached(options: argparse.Namespace, endpoint: str) -> Iterator[list[str]]:
    """The options by which `baton` reaches an endpoint of the cluster. Raises PluginError."""
    if options.address:
        yield [_OPTIONS[endpoint], options.address]
        return
    kubectl = Kubectl(_kubectl_flags(options))
    there = target(chosen(kubectl.serving_clusters(), options.cluster), endpoint)
    by_tls = ["--tls", "--tls-server-name", there.tls_name] if there.tls_name else []
    with kubectl.forwarded(there) as address:
        yield [_OPTIONS[endpoint], address, *by_tls]


def _kubectl_flags(options: argparse.Namespace) -> list[str]:
    given = {name: getattr(options, name) for name in ("kubeconfig", "context", "namespace")}
    return [f"--{name}={value}" for name, value in given.items() if value]


def _hint(options: argparse.Namespace) -> str:
    if options.address:
        return "Nothing answers at --address; without it kubectl forwards a port."
    return "`kubectl describe servingcluster` says what it waits for, `kubectl get pods` what runs."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="The baton command line for a ServingCluster.",
        epilog="commands: "
        + "; ".join(f"{name}: {what}" for name, (_, what) in _COMMANDS.items())
        + ". Their other options are those of baton: kubectl baton COMMAND --help.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("command", nargs="?", choices=_COMMANDS, metavar="COMMAND")
    parser.add_argument("-h", "--help", action="store_true", help="tell this, or a command's own")
    parser.add_argument("-n", "--namespace", metavar="NAME", help="the cluster's (the context's)")
    parser.add_argument("--cluster", metavar="NAME", help="of the ServingCluster, if several")
    parser.add_argument("--address", metavar="HOST:PORT", help="ask there; nothing is forwarded")
    parser.add_argument("--context", metavar="NAME", help="of the kubeconfig")
    parser.add_argument("--kubeconfig", metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
