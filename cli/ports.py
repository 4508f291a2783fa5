"""The ports that a configuration takes on this machine: told before minutes of loading."""

from __future__ import annotations

import itertools
import socket
from dataclasses import dataclass

from baton.config.cluster import ClusterConfig
from baton.errors import ConfigError

_ANY_HOST = {"0.0.0.0", "::"}


@dataclass(frozen=True)
class _Wanted:
    """`key` is the setting that names the port; 0: any free one."""

    key: str
    host: str
    port: int
    may_share: bool = False


def check_ports(config: ClusterConfig) -> None:
    """Raises ConfigError naming the setting whose port is taken, or the two that want one port."""
    wanted = _wanted(config)
    for one, other in itertools.combinations(wanted, 2):
        if one.port and one.port == other.port and _meet(one.host, other.host):
            raise ConfigError(
                f"{one.key} and {other.key} are both {one.port}: choose another for one of them; "
                "0 is any free port",
                field=other.key,
            )
    for each in wanted:
        _check_free(each)


def _wanted(config: ClusterConfig) -> list[_Wanted]:
    """Raises ConfigError when workers would have to share a port."""
    router, control, worker = config.router, config.control, config.worker
    num_workers = sum(pool.replicas for pool in config.pools.values())
    of_workers = {"worker.port": worker.port, "worker.metrics_port": worker.metrics_port}
    for key, port in of_workers.items():
        if port and num_workers > 1:
            raise ConfigError(
                f"{key}: {num_workers} workers on one machine cannot share port {port}; "
                "0 gives each a free one",
                field=key,
            )
    wanted = [
        _Wanted("control.port", control.host, control.port),
        _Wanted("router.port", router.host, router.port, router.reuse_port),
    ]
    if router.metrics_port is not None:
        wanted.append(_Wanted("router.metrics_port", router.host, router.metrics_port))
    if router.health_port is not None:
        wanted.append(
            _Wanted("router.health_port", router.host, router.health_port, router.reuse_port)
        )
    wanted += [
        _Wanted(key, "127.0.0.1", port) for key, port in of_workers.items() if port is not None
    ]
    return wanted


def _meet(host: str, other: str) -> bool:
    """Whether one address is among those of both hosts."""
    addresses, others = _addresses(host), _addresses(other)
    return bool(addresses & others or (addresses | others) & _ANY_HOST)


def _addresses(host: str) -> set[str]:
    """None for a name that nobody knows, which `_check_free` tells."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, flags=socket.AI_PASSIVE)
    except OSError:
        return set()
    return {str(target[0]) for *_, target in found}


def _check_free(wanted: _Wanted) -> None:
    from router.listening import check_can_listen

    try:
        check_can_listen(f"{wanted.host}:{wanted.port}", wanted.may_share)
    except ConfigError as error:
        raise ConfigError(
            f"{error.message}. Is a cluster up already? "
            f"Otherwise choose another {wanted.key}; 0 is any free port",
            field=wanted.key,
        ) from error
