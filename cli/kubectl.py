"""`kubectl baton status|top|drain|explain`: finds a ServingCluster, and runs that `baton` command.
`kubectl baton preflight` runs the chart's `helm test` instead and shows what its pods said.

kubectl runs `kubectl-baton` as a plugin, and reaches the cluster for it: this module imports
nothing of Kubernetes. Exit codes are those of `baton`, and 3 where no ServingCluster is found or
reached.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cli import main as cli

_PROGRAM = "kubectl baton"
_COMMANDS = {
    "status": ("control", "pools, workers, load, cache, queue"),
    "top": ("control", "how busy pools and workers are; --watch goes on"),
    "drain": ("control", "WORKER: let it finish what it runs, then leave"),
    "explain": ("grpc", "PROMPT: where it would run, and at what cost"),
}
"""Each command's endpoint, as the ServingCluster's status calls it, and what the command does."""
_PREFLIGHT = "preflight"
_OF_ALL_UNITS = ("status", "top")
"""Commands that ask the control service of every unit."""
_OPTIONS = {"control": "--control", "grpc": "--router"}
"""The option of `baton` for each endpoint."""
_BY_TLS = "grpcs://"
_CONTROL_PORT = 7101
_ANSWER_S = 30.0
_TEST_S = 900  # the Jobs themselves end within 600
_FORWARD_S = 30.0
_RUNNING_S = 10  # kubectl itself waits a minute for a pod that there may never be
_END_S = 5.0
_LISTENS = re.compile(rb"Forwarding from (127\.0\.0\.1:[0-9]+)")
RIGHTS: Mapping[str, Sequence[str]] = {
    "servingclusters.baton.dev": ("list",),
    "services": ("get",),
    "pods": ("get", "list"),
    "pods/portforward": ("create",),
    "secrets": ("get",),
}
"""What the plugin asks an API server for: verbs by resource."""


# --- errors ---------------------------------------------------------------------------------------


class PluginError(Exception):
    """The ServingCluster cannot be reached."""

    def __init__(self, message: str, hint: str) -> None:
        """Report `message`, and what to do next in the line `hint`."""
        super().__init__(message)
        self.message, self.hint = message, hint


# --- which cluster --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A port of a Service. `tls_name` is the name in its certificate; None: plain text."""

    namespace: str
    service: str
    port: int
    tls_name: str | None = None


def chosen(clusters: Sequence[Mapping[str, Any]], name: str | None) -> Mapping[str, Any]:
    """Return the cluster of this name, or the only one. Raises PluginError."""
    names = sorted(each["metadata"]["name"] for each in clusters)
    if not names:
        raise PluginError(
            "no ServingCluster in this namespace",
            "-n NAMESPACE names another; `kubectl get servingclusters.baton.dev -A` lists all",
        )
    if name is None and len(names) > 1:
        raise PluginError(f"there are several: {', '.join(names)}", "--cluster NAME says which")
    found = [each for each in clusters if name in (None, each["metadata"]["name"])]
    if not found:
        raise PluginError(f"no ServingCluster {name!r}", f"there are: {', '.join(names)}")
    return found[0]


def target(cluster: Mapping[str, Any], endpoint: str) -> Target:
    """Return where the cluster serves `endpoint`, control or grpc: HOST.NAMESPACE.svc:PORT in its
    status, after grpcs:// where that is asked by TLS. Raises PluginError while it has none."""
    metadata = cluster["metadata"]
    address = (cluster.get("status") or {}).get("endpoints", {}).get(endpoint, "")
    host, _, port = address.removeprefix(_BY_TLS).rpartition(":")
    service, _, rest = host.partition(".")
    if not port.isdecimal() or not service or not rest:
        raise PluginError(
            f"ServingCluster {metadata['name']} is not served yet",
            f"`kubectl -n {metadata['namespace']} describe servingcluster {metadata['name']}` "
            "says what it waits for",
        )
    tls_name = host if address.startswith(_BY_TLS) else None
    return Target(rest.partition(".")[0], service, int(port), tls_name)


def heads(cluster: Mapping[str, Any]) -> dict[str, Target]:
    """Return the control service of each unit by its code, while there are several units. Ray's
    head runs it, and KubeRay makes a Service for each head."""
    metadata, status = cluster["metadata"], cluster.get("status") or {}
    codes = (status.get("rollout") or {}).get("units") or {}
    return {
        code: Target(metadata["namespace"], f"{metadata['name']}-{code}-head-svc", _CONTROL_PORT)
        for code in codes
    }


def identity_secret(cluster: Mapping[str, Any]) -> str:
    """Name the Secret with the operator's identity at the cluster's control service."""
    kind = "identity" if cluster["spec"].get("internalTLS") is None else "internal"
    return f"{cluster['metadata']['name']}-{kind}-operator"


# --- kubectl --------------------------------------------------------------------------------------


class Kubectl:
    """Asks kubectl, and holds its port-forwards. `flags` are kubectl's own for context and
    namespace."""

    def __init__(self, flags: Sequence[str]) -> None:
        """Raises PluginError where kubectl is not installed."""
        if shutil.which("kubectl") is None:
            raise PluginError(
                "kubectl is not on PATH",
                "--address HOST:PORT goes without it, where you reach the cluster's inside",
            )
        self._command = ["kubectl", *flags]

    @contextlib.contextmanager
    def operator_identity(self, cluster: Mapping[str, Any]) -> Iterator[str]:
        """Yield a folder with the operator's identity, which is gone when the block ends. Raises
        PluginError."""
        name = identity_secret(cluster)
        found = self.get("secret", name, f"--namespace={cluster['metadata']['namespace']}")
        with tempfile.TemporaryDirectory(prefix="baton-identity-") as folder:
            (Path(folder) / "operator").mkdir()
            for file, text in (found.get("data") or {}).items():
                (Path(folder) / "operator" / file).write_bytes(base64.b64decode(text))
            yield folder

    def get(self, *what: str) -> Any:
        """Return objects as `kubectl get` has them in JSON. Raises PluginError."""
        return json.loads(self.answer("get", *what, "--output", "json"))

    def answer(self, *what: str) -> str:
        """Return what a kubectl command prints. Raises PluginError."""
        command = [*self._command, *what]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_ANSWER_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            message = f"the API server does not answer within {_ANSWER_S:g} s"
            raise PluginError(message, "`kubectl cluster-info` asks for nothing else") from error
        if done.returncode:
            raise refusal(done.stderr)
        return done.stdout

    @contextlib.contextmanager
    def forwarded(self, target: Target) -> Iterator[str]:
        """Forward a Service's port and yield its address on this machine. kubectl has ended when
        the block ends. Raises PluginError."""
        command = [
            *(*self._command, "--namespace", target.namespace, "port-forward"),
            *("--pod-running-timeout", f"{_RUNNING_S}s", "--address", "127.0.0.1"),
            *(f"service/{target.service}", f":{target.port}"),
        ]
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
            )
            try:
                yield _address(process, errors, target)
            finally:
                _end(process)


def refusal(output: str) -> PluginError:
    """The error in kubectl's output, and what to do about it."""
    lines = [line for line in output.splitlines() if line.strip()]
    said = lines[-1].removeprefix("error: ") if lines else "kubectl failed and printed nothing"
    if "the server doesn't have a resource type" in said:
        hint = "install Baton's chart there, or name another cluster with --context"
    elif "orbidden" in said:
        rights = (f"{' and '.join(verbs)} {what}" for what, verbs in RIGHTS.items())
        hint = f"you need to {', '.join(rights)}"
    else:
        hint = "`kubectl cluster-info` shows whether kubectl reaches its cluster"
    return PluginError(said, hint)


def _address(process: subprocess.Popen[bytes], errors: IO[bytes], target: Target) -> str:
    """Return the address at which kubectl listens, once it says so."""
    assert process.stdout is not None
    late = threading.Timer(_FORWARD_S, process.terminate)
    late.start()
    try:
        for line in process.stdout:
            if found := _LISTENS.search(line):
                return found[1].decode()
        process.wait(_END_S)
    finally:
        late.cancel()
    errors.seek(0)
    why = refusal(errors.read().decode(errors="replace")).message
    if process.returncode == -signal.SIGTERM:
        why = f"kubectl forwards nothing within {_FORWARD_S:g} s"
    hint = f"`kubectl -n {target.namespace} get pods,service` shows whether its pods are ready"
    raise PluginError(f"service/{target.service}: {why}", hint)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


# --- the plugin -----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if options.command is None:
        parser.print_help()
        return 0 if options.help else cli.EXIT_USAGE
    if options.help:
        if options.command == _PREFLIGHT:
            parser.print_help()
            return 0
        return cli.main([options.command, "--help"], prog=_PROGRAM)
    try:
        if options.command == _PREFLIGHT:
            if rest or options.address:
                parser.error(f"preflight does not take {' '.join(rest) or '--address'}")
            return _preflight(options)
        endpoint, _ = _COMMANDS[options.command]
        # SIGTERM, too, leaves through every block that ends what was started.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        with _reached(options, endpoint) as where:
            command = [options.command, *where, *rest]
            return cli.main(command, prog=_PROGRAM, unreachable=_hint(options))
    except PluginError as error:
        print(f"{_PROGRAM}: {error.message}\n  {error.hint}", file=sys.stderr)
        return cli.EXIT_UNAVAILABLE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return cli.EXIT_INTERRUPTED


@contextlib.contextmanager
def _reached(options: argparse.Namespace, endpoint: str) -> Iterator[list[str]]:
    """Return the options by which `baton` reaches an endpoint of the cluster. Raises
    PluginError."""
    if options.address:
        yield [_OPTIONS[endpoint], options.address]
        return
    kubectl, cluster = _found(options)
    there = target(cluster, endpoint)
    units = heads(cluster) if options.command in _OF_ALL_UNITS else {}
    more = ["--tls", "--tls-server-name", there.tls_name] if there.tls_name else []
    with contextlib.ExitStack() as reached:
        if endpoint == "control":
            more += ["--identity", reached.enter_context(kubectl.operator_identity(cluster))]
        if len(units) > 1:
            addresses = reached.enter_context(_all_forwarded(kubectl, units))
            more += [f"--unit={code}={address}" for code, address in addresses.items()]
            address = next(iter(addresses.values()))
        else:
            address = reached.enter_context(kubectl.forwarded(there))
        yield [_OPTIONS[endpoint], address, *more]


def _found(options: argparse.Namespace) -> tuple[Kubectl, Mapping[str, Any]]:
    """Return kubectl with its flags, and the cluster that is meant. Raises PluginError."""
    given = {name: getattr(options, name) for name in ("kubeconfig", "context", "namespace")}
    kubectl = Kubectl([f"--{name}={value}" for name, value in given.items() if value])
    return kubectl, chosen(kubectl.get("servingclusters.baton.dev")["items"], options.cluster)


def _preflight(options: argparse.Namespace) -> int:
    """Run `helm test` of the cluster's release, and print what each of its pods found. Raises
    PluginError."""
    kubectl, cluster = _found(options)
    metadata = cluster["metadata"]
    release = (metadata.get("annotations") or {}).get("meta.helm.sh/release-name")
    if release is None:
        raise PluginError(
            f"ServingCluster {metadata['name']} is not of a Helm release",
            "`python -m cluster.preflight` in a worker's pod checks that pod alone",
        )
    if shutil.which("helm") is None:
        raise PluginError("helm is not on PATH", "it runs the preflight's pods: install it")
    namespace = metadata["namespace"]
    given = {"kubeconfig": options.kubeconfig, "kube-context": options.context}
    flags = [f"--{name}={value}" for name, value in given.items() if value]
    command = ["helm", "test", release, f"--namespace={namespace}", f"--timeout={_TEST_S}s", *flags]
    test = subprocess.run(command, capture_output=True, text=True, check=False)
    labels = f"app.kubernetes.io/component=preflight,app.kubernetes.io/instance={release}"
    there = f"--namespace={namespace}"
    pods = kubectl.get("pods", f"--selector={labels}", there)["items"]
    if test.returncode and not pods:
        raise PluginError(test.stderr.strip().rpartition("\n")[2], f"`{' '.join(command)}` says it")
    for pod in sorted(pods, key=lambda each: str(each["metadata"]["name"])):
        name, node = pod["metadata"]["name"], pod["spec"].get("nodeName")
        if node is None:
            why = [each.get("message", "") for each in pod["status"].get("conditions", ())]
            print(f"{name}\nFAIL  on no node: {' '.join(why)}\n")
        else:
            told = kubectl.answer("logs", name, "--container=preflight", there)
            print(f"{name} on {node}\n{told}")
    return cli.EXIT_FAILED if test.returncode else 0


@contextlib.contextmanager
def _all_forwarded(kubectl: Kubectl, units: Mapping[str, Target]) -> Iterator[dict[str, str]]:
    """Forward to every unit, and yield addresses by unit. A unit that kubectl does not reach is
    left out, since its head may have gone. Raises PluginError when it reaches none."""
    addresses, errors = {}, []
    with contextlib.ExitStack() as forwards:
        for code, there in units.items():
            try:
                addresses[code] = forwards.enter_context(kubectl.forwarded(there))
            except PluginError as error:
                errors.append(error)
        if not addresses:
            raise errors[0]
        yield addresses


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
        + f"; {_PREFLIGHT}: check the pools' nodes and the link between them, by `helm test`"
        + ". Their other options are those of baton: kubectl baton COMMAND --help.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("command", nargs="?", choices=[*_COMMANDS, _PREFLIGHT], metavar="COMMAND")
    parser.add_argument("-h", "--help", action="store_true", help="show this, or a command's own")
    parser.add_argument("-n", "--namespace", metavar="NAME", help="the cluster's (the context's)")
    parser.add_argument("--cluster", metavar="NAME", help="of the ServingCluster, if several")
    parser.add_argument("--address", metavar="HOST:PORT", help="ask there; nothing is forwarded")
    parser.add_argument("--context", metavar="NAME", help="of the kubeconfig")
    parser.add_argument("--kubeconfig", metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
