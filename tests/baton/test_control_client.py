"""What asks the registry, when the registry's host vanishes or is silent."""

from __future__ import annotations

import contextlib

import pytest

import baton.control.client as control_module
from baton.control.client import ControlClient
from baton.errors import UnavailableError
from baton.identity.identity import Identity
from tests.baton.proxied import proxied
from tests.baton.small_router import SmallControl, silent_address
from tests.router.proxy import Proxy


def test_a_registry_whose_host_vanished_is_lost_within_two_pings_and_heard_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}
    options = [(name, 500 if name in quick else n) for name, n in control_module._CHANNEL_OPTIONS]
    monkeypatch.setattr(control_module, "_CHANNEL_OPTIONS", options)
    with (
        SmallControl().serve() as address,
        proxied(address) as (before, then),
        ControlClient(before, identity=Identity("operator")) as control,
    ):
        fleets = control.watch_fleet(10.0)
        assert len(next(fleets).workers) == 1
        then(Proxy.strand)
        with pytest.raises(UnavailableError):
            list(fleets)
        for _ in range(5):  # a busy machine may answer a ping of the new connection late, too
            with contextlib.suppress(UnavailableError):
                assert len(control.fleet().workers) == 1
                return
    pytest.fail("it is not heard again")


def test_a_control_service_that_is_silent_is_unavailable() -> None:
    with (
        silent_address() as address,
        ControlClient(address, call_timeout_s=0.2) as client,
    ):
        for ask in (client.fleet, lambda: client.set_replicas("decode", 2)):
            with pytest.raises(UnavailableError, match=f"no answer from {address} within 0.2 s"):
                ask()
