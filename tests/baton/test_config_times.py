"""Settings that must fit each other: one that outlasts another, and the error when it does not."""

from __future__ import annotations

import pytest

from baton.config.cluster import parse_config
from baton.errors import ConfigError
from cluster.worker.config import worker_config


def test_a_drain_is_not_cut_short_by_the_supervisor() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"worker": {"drain_timeout_s": 90}})
    assert caught.value.field == "supervisor.drain_timeout_s"
    assert "must be above worker.drain_timeout_s (90.0), not 60.0" in caught.value.message


def test_a_pools_own_drain_is_not_cut_short_either() -> None:
    pools = {"decode": {"role": "decode", "drain_timeout_s": 90}, "prefill": {"role": "prefill"}}
    with pytest.raises(ConfigError, match=r"pools\.decode\.drain_timeout_s \(90\.0\)"):
        parse_config({"pools": pools})
    config = parse_config({"pools": pools, "supervisor": {"drain_timeout_s": 100}})
    drains = {
        pool: worker_config(config, pool, f"{pool}-0", "127.0.0.1:1").settings.drain_timeout_s
        for pool in pools
    }
    assert drains == {"decode": 90.0, "prefill": 30.0}


def test_a_worker_is_not_silent_between_two_heartbeats() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"registry": {"silent_after_s": 0.2}})
    assert caught.value.field == "worker.heartbeat_s"
    assert "must be below registry.silent_after_s (0.2), not 0.3" in caught.value.message


def test_a_hung_worker_is_fenced_before_it_is_given_up_for_gone() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"supervisor": {"fence_after_s": 12}})
    assert caught.value.field == "registry.gone_after_s"
    assert "supervisor.fence_after_s (15), not 15.0" in caught.value.message


def test_a_router_waits_for_a_first_step_for_as_long_as_the_registry_does() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"registry": {"first_step_s": 150}})
    assert caught.value.field == "router.first_token_timeout_s"
    assert "must be above registry.first_step_s (150), not 150" in caught.value.message


@pytest.mark.parametrize(
    ("section", "name", "seconds"),
    [("transfer", "tombstone_s", 3605), ("router", "max_timeout_s", 3995)],
)
def test_a_lease_is_remembered_for_longer_than_any_call_can_name_it(
    section: str, name: str, seconds: int
) -> None:
    config = parse_config({section: {name: seconds + (1 if section == "transfer" else -1)}})
    assert config.transfer.tombstone_s > config.router.max_timeout_s
    with pytest.raises(ConfigError) as caught:
        parse_config({section: {name: seconds}})
    assert caught.value.field == "transfer.tombstone_s"
    assert "must be above router.reserve_timeout_s + router.max_timeout_s" in caught.value.message
