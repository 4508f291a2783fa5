"""What three clouds' metadata services say of a machine's end, over HTTP, and how it is read."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Iterator

import pytest

from cluster.errors import MetadataError
from cluster.node.spot_watch import CLOUDS, Notice, drain_s, is_outlived
from tests.cluster.metadata_server import OWN_NAME, MetadataServer, serving_metadata

NOW = datetime.datetime(2026, 11, 22, 8, 20, tzinfo=datetime.UTC)


@pytest.fixture
def served() -> Iterator[MetadataServer]:
    with serving_metadata() as served:
        yield served


def seconds_left(notice: Notice | None) -> float:
    assert notice is not None
    assert notice.ends_at is not None
    return (notice.ends_at - datetime.datetime.now(datetime.UTC)).total_seconds()


def test_aws_announces_an_end_and_a_recommendation_to_rebalance_is_none(
    served: MetadataServer,
) -> None:
    cloud = CLOUDS["aws"](served.address)
    assert cloud.poll() is None  # the server recommends to rebalance all the time
    served.call_back("aws", in_s=120)
    notice = cloud.poll()
    assert notice is not None
    assert notice.what == "terminate"
    assert 115 < seconds_left(notice) <= 120


def test_an_aws_token_is_kept_and_asked_for_anew_when_it_has_run_out(
    served: MetadataServer,
) -> None:
    cloud = CLOUDS["aws"](served.address)
    for _ in range(3):
        assert cloud.poll() is None
    assert served.asked.count("/latest/api/token") == 1
    served.forget_tokens()
    assert cloud.poll() is None
    assert served.asked.count("/latest/api/token") == 2


def test_gcp_answers_as_soon_as_the_machine_is_preempted(served: MetadataServer) -> None:
    cloud = CLOUDS["gcp"](served.address)
    assert cloud.poll() is None
    found: list[tuple[Notice | None, float]] = []
    waiting = threading.Thread(target=lambda: found.append((cloud.poll(), time.monotonic())))
    waiting.start()
    served.until_asked(2)  # it waits at the server now, or is about to
    called_at = time.monotonic()
    served.call_back("gcp", in_s=30)
    waiting.join(10)
    ((notice, heard_at),) = found
    assert notice == Notice("preempted", None)
    assert heard_at - called_at < 5  # it would have waited for 30 s


def test_gcps_watcher_that_begins_after_the_notice_hears_of_it(served: MetadataServer) -> None:
    served.call_back("gcp", in_s=30)
    assert CLOUDS["gcp"](served.address).poll() == Notice("preempted", None)


@pytest.mark.parametrize(
    ("kind", "machine"),
    [("Preempt", "aks-gpu-31215_8"), ("Freeze", OWN_NAME), ("Reboot", OWN_NAME)],
)
def test_azures_events_of_other_machines_and_kinds_are_no_notice(
    served: MetadataServer, kind: str, machine: str
) -> None:
    served.announce(kind, machine, "Sun, 22 Nov 2026 08:22:00 GMT")
    assert CLOUDS["azure"](served.address).poll() is None


def test_azure_announces_when_this_machine_ends(served: MetadataServer) -> None:
    cloud = CLOUDS["azure"](served.address)
    assert cloud.poll() is None
    served.announce("Terminate", OWN_NAME.upper(), "Sun, 22 Nov 2026 08:22:00 GMT")
    assert cloud.poll() == Notice("Terminate", NOW + datetime.timedelta(minutes=2))


def test_an_end_of_azures_that_has_begun_is_one_whose_time_is_not_said(
    served: MetadataServer,
) -> None:
    served.announce("Preempt", OWN_NAME, "")
    assert CLOUDS["azure"](served.address).poll() == Notice("Preempt", None)


@pytest.mark.parametrize("name", sorted(CLOUDS))
def test_another_clouds_service_is_no_notice_but_an_error(
    served: MetadataServer, name: str
) -> None:
    with pytest.raises(MetadataError, match=r"status 40|neither TRUE"):
        CLOUDS[name](served.address + "/proxy").poll()


@pytest.mark.parametrize("name", sorted(CLOUDS))
def test_a_service_that_is_not_there_is_an_error_that_names_it(
    served: MetadataServer, name: str
) -> None:
    with pytest.raises(MetadataError, match=r"http://127\.0\.0\.1:9/"):
        CLOUDS[name]("http://127.0.0.1:9").poll()


@pytest.mark.parametrize("name", sorted(CLOUDS))
def test_no_proxy_is_asked_for_a_machines_own_metadata(
    served: MetadataServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert CLOUDS[name](served.address).poll() is None


@pytest.mark.parametrize(
    ("left_s", "timeout_s", "wanted_s"),
    [(120, 600, 120), (120, 60, 65), (None, 600, 30), (3, 600, 3), (-5, 600, 1)],
)
def test_a_drain_ends_with_its_machine_at_the_latest(
    left_s: float | None, timeout_s: float, wanted_s: float
) -> None:
    ends_at = None if left_s is None else NOW + datetime.timedelta(seconds=left_s)
    assert drain_s(Notice("terminate", ends_at), timeout_s, 30, NOW) == wanted_s


def test_a_notice_is_outlived_once_its_time_is_over_for_long_enough() -> None:
    before = NOW - datetime.timedelta(seconds=60)
    assert is_outlived(Notice("hibernate", before), 60, NOW)
    assert not is_outlived(Notice("hibernate", before), 61, NOW)
    assert not is_outlived(Notice("TRUE", None), 0, NOW)
