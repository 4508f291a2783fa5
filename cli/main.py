"""`baton`: bring a cluster up, ask it, look at it, change it.

Exit codes: 0 done · 1 the request failed · 2 wrong usage or configuration · 3 nothing answers at
the address · 130 interrupted. Each command's code is imported only when it runs, so that asking a
running cluster needs neither torch nor ray.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
from collections.abc import Sequence

from baton.errors import (
    BatonError,
    ConfigError,
    HandshakeError,
    InvalidRequestError,
    NoCapacityError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)

_MOST_DIGITS = 9  # what the wire can carry, and no pool or prompt has more
_LONGEST_WAIT_S = 7 * 86400.0  # gRPC treats an endless wait as one that is over
EXIT_FAILED, EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_INTERRUPTED = 1, 2, 3, 130

# Command -> module that has a function of that name taking the parsed arguments.
_COMMANDS = {
    "up": "cli.bring_up",
    "demo": "cli.demo",
    "generate": "cli.ask",
    "chat": "cli.ask",
    "explain": "cli.ask",
    "status": "cli.status",
    "top": "cli.status",
    "diagnose": "cli.diagnose",
    "scale": "cli.operate",
    "drain": "cli.operate",
    "roles": "cli.operate",
    "deploy": "cli.operate",
    "size": "cli.size",
}
_PACKAGES = (
    *("baton", "router", "prefill_worker", "decode_worker", "kv_transfer"),
    *("engine", "cluster", "deploy", "cli"),
)


def main(argv: Sequence[str] | None = None, *, prog: str = "baton", unreachable: str = "") -> int:
    """Run a command. `prog` is the program's name in messages; `unreachable` is the hint if nothing
    answers (empty: the one for a cluster of `baton up`)."""
    parser = _parser(prog)
    parser.set_defaults(prog=prog, unreachable=unreachable)
    arguments = parser.parse_args(argv)
    if arguments.version:
        return _print_version(arguments)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    if _COMMANDS[arguments.command] == "cli.ask":  # our own message says why a handshake fails
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        command = getattr(importlib.import_module(_COMMANDS[arguments.command]), arguments.command)
        code: int = command(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left; Python would complain again while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except BatonError as error:
        return _report(error, arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", *_PACKAGES):
            raise
        need = f"`baton {arguments.command}` needs {package}, which is not installed"
        return _report(ConfigError(f"{need}: pip install 'baton-serve[worker]'"), arguments)
    return code


def _print_version(arguments: argparse.Namespace) -> int:
    from importlib import metadata

    try:
        print(f"baton {metadata.version('baton-serve')}")
    except metadata.PackageNotFoundError:
        return _report(ConfigError("baton-serve is not installed, so it has no version"), arguments)
    return 0


def _report(error: BatonError, arguments: argparse.Namespace) -> int:
    from baton.render import err

    err().print(f"{arguments.prog}:", end=" ", style="red", markup=False)
    err().print(error.message, markup=False)
    hint = _hint(error, arguments)
    if hint:
        err().print(f"  {hint}", style="dim", markup=False)
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    return EXIT_UNAVAILABLE if isinstance(error, UnavailableError) else EXIT_FAILED


_ACCESS_HINTS: dict[type[BatonError], str] = {
    UnauthenticatedError: "Name the file with your tenant's token by --token-file, or set "
    "BATON_TOKEN.",
    PermissionDeniedError: "Leave the tenant out, or take that tenant's token.",
    HandshakeError: "--tls asks by TLS, --tls-ca FILE trusts an authority, --tls-cert and "
    "--tls-key show your own certificate, --tls-server-name says whom the router's must name.",
}
"""What to do where TLS or a token is missing."""
_IDENTITY_HINT = (
    "--identity FOLDER, or BATON_IDENTITY, names the cluster's folder of identities, in which "
    "`operator` is this command's."
)


def _hint(error: BatonError, arguments: argparse.Namespace) -> str:
    """Return what to do next."""
    if arguments.command in ("up", "demo", "deploy", "size"):
        return ""
    asks_control = arguments.command in ("status", "top", "scale", "roles", "drain")
    if hint := _ACCESS_HINTS.get(type(error)):
        return _IDENTITY_HINT if asks_control else hint
    if isinstance(error, UnavailableError):
        if arguments.unreachable:
            return str(arguments.unreachable)
        option = "--control HOST:PORT" if asks_control else "--router HOST:PORT"
        return f"Is the cluster up? Start one with `baton up`, or name another with {option}."
    if isinstance(error, NotFoundError) and arguments.command in ("scale", "roles", "drain"):
        return f"`{arguments.prog} status` lists pools and workers."
    if isinstance(error, InvalidRequestError) and arguments.command == "scale":
        return f"`pools.{arguments.pool}.max_replicas` in the cluster file is the bound."
    if isinstance(error, NoCapacityError) and arguments.command == "scale":
        return "Scale another pool in first."
    if error.field == "chat" and arguments.command == "generate":
        return "Send the prompt as it is with `baton generate --raw`."
    if error.retry_after_s is not None:
        return f"Try again in {error.retry_after_s:g} s."
    return ""


def _parser(prog: str = "baton") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Serve large language models with prefill and decode on separate pools.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_cluster_commands(commands)
    _add_request_commands(commands)
    _add_operator_commands(commands)
    _add_size_command(commands)
    return parser


Subparsers = argparse._SubParsersAction  # argparse's own type


def _add_cluster_commands(commands: Subparsers[argparse.ArgumentParser]) -> None:
    up = commands.add_parser("up", help="start a cluster on this machine; ctrl-C ends it")
    demo = commands.add_parser("demo", help="start a cluster, ask it things, stop it")
    deploy = commands.add_parser("deploy", help="print the Kubernetes manifest of a cluster file")
    for command in (up, demo, deploy):
        command.add_argument(
            "-f", "--file", metavar="YAML", help="cluster file (default: 1 + 1 workers)"
        )
    up.add_argument("--model", metavar="FOLDER", help="serve this model instead")
    up.add_argument(
        "--autoscale", action="store_true", help="let the pools follow the load (section planner)"
    )
    deploy.add_argument("--name", default="default", help="of the ServingCluster (%(default)s)")
    deploy.add_argument("-n", "--namespace", metavar="NAME", help="where it is to run")


def _add_request_commands(commands: Subparsers[argparse.ArgumentParser]) -> None:
    generate = commands.add_parser("generate", help="ask one thing and stream the answer")
    chat = commands.add_parser("chat", help="talk to the model")
    explain = commands.add_parser("explain", help="where a prompt would run, and at what cost")
    generate.add_argument("prompt", metavar="PROMPT", help='what to ask; "-" reads standard input')
    explain.add_argument("prompt", metavar="PROMPT")
    chat.add_argument("--system", metavar="TEXT", help="the system prompt")
    for command in (generate, explain):
        command.add_argument(
            "--raw", action="store_true", help="send the prompt as it is, without the chat template"
        )
    for command in (generate, chat, explain):
        command.add_argument("--max-tokens", type=int, metavar="N")
        _add_router(command)
    for command in (generate, chat):
        _add_sampling(command)


def _add_operator_commands(commands: Subparsers[argparse.ArgumentParser]) -> None:
    status = commands.add_parser("status", help="pools, workers, load, cache, queue")
    top = commands.add_parser("top", help="how busy pools and workers are")
    top.add_argument("-w", "--watch", action="store_true", help="go on until ctrl-C")
    diagnose = commands.add_parser("diagnose", help="what slows requests down, and what to do")
    diagnose.add_argument(
        "--metrics",
        type=_address,
        metavar="HOST:PORT",
        default=os.environ.get("BATON_METRICS", "127.0.0.1:7102"),
        help="a router's router.metrics.port (BATON_METRICS; %(default)s), asked with BATON_TOKEN",
    )
    scale = commands.add_parser("scale", help="change how many workers a pool has")
    scale.add_argument("pool", metavar="POOL")
    scale.add_argument("replicas", metavar="N", type=_count)
    roles = commands.add_parser("roles", help="split a mixed pool's workers into roles, at once")
    roles.add_argument("pool", metavar="POOL")
    roles.add_argument("--prefill", type=_count, default=0, metavar="N", help="prefill alone")
    roles.add_argument("--decode", type=_count, default=0, metavar="N", help="decode alone")
    drain = commands.add_parser("drain", help="let a worker finish what it runs, then leave")
    drain.add_argument("worker", metavar="WORKER")
    for command in (scale, drain):
        command.add_argument(
            "--no-wait", action="store_true", help="return at once instead of when it is done"
        )
        command.add_argument(
            "--timeout",
            type=_seconds,
            default=120.0,
            metavar="S",
            help="longest wait (%(default)g)",
        )
    for command in (status, top, scale, roles, drain):
        command.add_argument(
            "--control",
            type=_address,
            metavar="HOST:PORT",
            default=os.environ.get("BATON_CONTROL", "127.0.0.1:7101"),
            help="the control service (BATON_CONTROL; %(default)s)",
        )

        command.add_argument(
            "--identity",
            metavar="FOLDER",
            help="the cluster's folder of identities (BATON_IDENTITY; without it, that of this "
            "user's `baton up`; off: the cluster asks for none)",
        )

    for command in (status, top):
        command.add_argument(
            "--unit",
            action="append",
            type=_unit_address,
            metavar="CODE=HOST:PORT",
            help="where a unit's control service is reached from here; may be given again",
        )


def _add_size_command(commands: Subparsers[argparse.ArgumentParser]) -> None:
    size = commands.add_parser("size", help="what a model needs of GPUs and links, by arithmetic")
    size.add_argument("model", metavar="MODEL", help="a folder, or its config.json")
    size.add_argument("--gpu", metavar="NAME", help="such as H100")
    for option in ("--memory-gb", "--bandwidth-gbs", "--tflops"):
        size.add_argument(option, type=_positive, metavar="N", help="in place of --gpu's")
    for option in ("--context", "--prompt", "--answer"):
        size.add_argument(option, type=_positive, metavar="TOKENS")
    for option, of in (("--tp", "GPUs a worker"), ("--rate", "requests/s")):
        size.add_argument(option, type=_positive, metavar="N", default=1, help=of)
    size.add_argument("--quantization", choices=("none", "int8"), default="none")
    size.add_argument("--slo", nargs=2, type=_seconds, default=(), metavar=("TTFT_S", "ITL_S"))
    size.add_argument("--output", choices=("table", "json"), default="table")
    size.add_argument("--explain", action="store_true", help="each figure with its formula")


def _add_router(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", metavar="NAME", help="only if several are served")
    command.add_argument(
        "--router",
        type=_addresses,
        metavar="HOST:PORT[,...]",
        default=os.environ.get("BATON_ROUTER", "127.0.0.1:7100"),
        help="one or more routers (BATON_ROUTER; %(default)s)",
    )
    # A token itself is never an option, since others can read command lines.
    command.add_argument("--tls", action="store_true", help="ask by TLS; those below imply it")
    command.add_argument(
        "--tls-ca",
        metavar="FILE",
        default=os.environ.get("BATON_TLS_CA"),
        help="authorities to trust (BATON_TLS_CA; without it the usual public ones)",
    )
    command.add_argument("--tls-cert", metavar="FILE", help="this client's own certificate")
    command.add_argument("--tls-key", metavar="FILE", help="its key")
    command.add_argument(
        "--tls-server-name", metavar="NAME", help="whom the router's certificate must name"
    )
    command.add_argument(
        "--token-file", metavar="FILE", help="holds the bearer token (else BATON_TOKEN does)"
    )


def _add_sampling(command: argparse.ArgumentParser) -> None:
    command.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    command.add_argument("--top-k", type=int, metavar="K")
    command.add_argument("--top-p", type=float, metavar="P")
    command.add_argument("--min-p", type=float, metavar="P")
    command.add_argument("--seed", type=int, metavar="N")
    command.add_argument("--stop", action="append", metavar="TEXT", help="may be given again")
    command.add_argument("--stats", action="store_true", help="say what the answer cost")


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        what = f"a whole number of at most {_MOST_DIGITS} digits: 0, 1, 2 ..."
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(text)


def _positive(text: str) -> int:
    if not _count(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_WAIT_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds above 0 and up to {_LONGEST_WAIT_S:.0f}"
        )
    return seconds


def _address(text: str) -> str:
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, like 127.0.0.1:7100")
    return text.strip()


def _unit_address(text: str) -> tuple[str, str]:
    code, _, address = text.partition("=")
    return code, _address(address)


def _addresses(text: str) -> list[str]:
    return [_address(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
