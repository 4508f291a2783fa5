"""A network of pods: an address for each, all on one bridge, which this machine reaches, too.

The bridge is in a namespace of its own, which a process holds, as one holds each pod's: when the
processes are gone, so are the namespaces and all that was in them, also when nobody tidied up.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import subprocess
import threading
from collections.abc import Mapping, Sequence

from tests.k8s.kubelet.errors import KernelError

_HOLDER = 'hostname "$0" && echo ready && exec sleep infinity'
_END_S = 5.0
_NUM_TRIES = 20
_NUM_ADDRESSES = 253
_COMMAND_TIMEOUT_S = 20.0


class Holder:
    """Own a process that holds a network and a host name."""

    def __init__(self, host_name: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", _HOLDER, host_name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **environment},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.end()
            raise KernelError("no namespaces can be made")

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        """The namespaces go with it."""
        self._process.kill()
        self._process.wait(_END_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Network:
    """Own the bridge, its link to this machine, and the pods' addresses."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment`: of the processes that hold the namespaces."""
        self._environment = environment
        self._prefix = _free_prefix()
        self.gateway = f"{self._prefix}.1"
        """This machine, as pods reach it."""
        self._hosts = itertools.cycle(range(2, 2 + _NUM_ADDRESSES))
        self._used: set[str] = set()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self.link = f"bk{secrets.token_hex(4)}"
        """The name of this machine's own end."""
        self._switch = Holder("switch", environment)
        try:
            self._wire()
        except KernelError:
            self.close()
            raise

    def _wire(self) -> None:
        pid = self._switch.pid
        ip(
            f"link add {self.link} type veth peer name uplink netns {pid}",
            f"addr add {self.gateway}/24 dev {self.link}",
            f"link set {self.link} up",
        )
        ip("link add pods type bridge", "link set uplink master pods", network_of=pid)
        ip("link set uplink up", "link set pods up", network_of=pid)

    def join(self, host_name: str) -> PodNetwork:
        """Raises KernelError."""
        address = self._take_address()
        try:
            holder = Holder(host_name, self._environment)
            try:
                self._plug(holder.pid, f"pod{next(self._numbers)}", address)
            except KernelError:
                holder.end()
                raise
        except KernelError:
            self.free(address)
            raise
        return PodNetwork(self, holder, address)

    def _plug(self, pid: int, port: str, address: str) -> None:
        switch = self._switch.pid
        ip(
            f"link add {port} type veth peer name eth0 netns {pid}",
            f"link set {port} master pods",
            f"link set {port} up",
            network_of=switch,
        )
        ip(
            "link set lo up",
            f"addr add {address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {self.gateway}",
            network_of=pid,
        )

    def free(self, address: str) -> None:
        with self._lock:
            self._used.remove(address)

    def close(self) -> None:
        with contextlib.suppress(KernelError):  # it may be that it was not made
            ip(f"link delete {self.link}")  # the kernel takes its time with that of a namespace
        self._switch.end()

    def _take_address(self) -> str:
        """The one that has been free for longest."""
        with self._lock:
            for _ in range(_NUM_ADDRESSES):
                address = f"{self._prefix}.{next(self._hosts)}"
                if address not in self._used:
                    self._used.add(address)
                    return address
        raise KernelError("there are too many pods")


class PodNetwork:
    """Own one pod's network and host name."""

    def __init__(self, network: Network, holder: Holder, address: str) -> None:
        self._network = network
        self._holder = holder
        self.address = address

    @property
    def pid(self) -> int:
        """Of the process that holds it."""
        return self._holder.pid

    def leave(self) -> None:
        self._holder.end()
        self._network.free(self.address)


def links() -> set[str]:
    """The names of this machine's own network links."""
    return {each["ifname"] for each in json.loads(run(["ip", "-json", "link"]))}


def _free_prefix() -> str:
    """Of the addresses that are reserved for tests of networks (RFC 2544), a net of 256."""
    routes = {each["dst"] for each in json.loads(run(["ip", "-json", "route"]))}
    for _ in range(_NUM_TRIES):
        prefix = f"198.{18 + secrets.randbelow(2)}.{secrets.randbelow(256)}"
        if f"{prefix}.0/24" not in routes:
            return prefix
    raise KernelError("no net of 198.18.0.0/15 is free")


def ip(*lines: str, network_of: int | None = None) -> None:
    """`ip` with each line, in the network of a process. Raises KernelError."""
    command = ["ip", "-batch", "-"]
    if network_of is not None:
        command = ["nsenter", f"--net=/proc/{network_of}/ns/net", *command]
    run(command, "\n".join(lines) + "\n")


def run(command: Sequence[str], stdin: str = "") -> str:
    """Its stdout. Raises KernelError."""
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise KernelError(f"{' '.join(command)}: {stdin}{done.stderr.strip()}")
    return done.stdout
