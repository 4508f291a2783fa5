"""`kubectl baton`: which cluster is meant, how it is reached, and that nothing is left behind."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.identity.keys import role_files
from baton.v1 import control_pb2
from cli.kubectl import PluginError, Target, chosen, heads, identity_secret, main, refusal, target
from cluster.local.process_tree import Process, descendants, wait_until_gone
from tests.baton.small_router import Book, SmallControl, SmallRouter
from tests.baton.terminal import default_signals
from tests.identities import ROOT

Capture = pytest.CaptureFixture[str]
ENDPOINTS = {"grpc": "default-router.serving.svc:7100",
             "control": "default-control.serving.svc:7101"}  # fmt: skip
NEEDED = (
    "list servingclusters.baton.dev, get services, get and list pods, create pods/portforward, "
    "get secrets"
)


def cluster(name: str, endpoints: dict[str, str] | None = None) -> dict[str, Any]:
    status = {"endpoints": endpoints} if endpoints else {}
    metadata = {"name": name, "namespace": "serving"}
    return {"metadata": metadata, "spec": {}, "status": status}


# --- which one ------------------------------------------------------------------------------------


def test_the_only_cluster_is_meant_and_of_several_the_named_one() -> None:
    one, other = cluster("one"), cluster("other")
    assert chosen([one], None) is one
    assert chosen([one, other], "other") is other


@pytest.mark.parametrize(
    ("clusters", "name", "message", "hint"),
    [
        ((), None, "no ServingCluster in this namespace", "-n NAMESPACE"),
        (("b", "a"), None, "there are several: a, b", "--cluster NAME"),
        (("a",), "c", "no ServingCluster 'c'", "there are: a"),
    ],
)
def test_what_cannot_be_chosen_is_told_with_what_to_do(
    clusters: tuple[str, ...], name: str | None, message: str, hint: str
) -> None:
    with pytest.raises(PluginError) as told:
        chosen([cluster(each) for each in clusters], name)
    assert told.value.message == message
    assert hint in told.value.hint


def test_an_endpoint_is_a_port_of_a_service() -> None:
    told = cluster("default", ENDPOINTS)
    assert target(told, "control") == Target("serving", "default-control", 7101)
    assert target(told, "grpc") == Target("serving", "default-router", 7100)
    by_tls = cluster("default", {"grpc": f"grpcs://{ENDPOINTS['grpc']}"})
    name = "default-router.serving.svc"
    assert target(by_tls, "grpc") == Target("serving", "default-router", 7100, name)


@pytest.mark.parametrize("endpoints", [None, {"grpc": ENDPOINTS["grpc"]}, {"control": "nowhere"}])
def test_a_cluster_that_does_not_tell_yet_is_to_be_described(
    endpoints: dict[str, str] | None,
) -> None:
    with pytest.raises(PluginError, match="is not served yet") as told:
        target(cluster("default", endpoints), "control")
    assert "describe servingcluster default" in told.value.hint


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ('error: the server doesn\'t have a resource type "servingclusters"', "chart"),
        ("Error from server (Forbidden): servingclusters is forbidden", NEEDED),
        ("The connection to the server was refused", "cluster-info"),
    ],
)
def test_kubectls_words_come_with_what_to_do(words: str, hint: str) -> None:
    told = refusal(f"{words}\n")
    assert told.message == words.removeprefix("error: ")
    assert hint in told.hint


# --- reaching it ----------------------------------------------------------------------------------


@pytest.fixture
def control() -> Iterator[str]:
    with SmallControl().serve() as address:
        yield address


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the stand-in for kubectl, which is on PATH; one cluster is there."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.deploy.kubectl.stand_in "$@"\n')
    program.chmod(0o700)
    files = role_files(ROOT, "operator").items()
    data = {name: base64.b64encode(content).decode() for name, content in files}
    (tmp_path / "secret.json").write_text(json.dumps({"data": data}))
    (tmp_path / "clusters.json").write_text(json.dumps({"items": [cluster("default", ENDPOINTS)]}))
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setenv("BATON_IDENTITY", "off")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    return tmp_path


def has_ended(folder: Path) -> bool:
    pid = int((folder / "pid").read_text())
    return pid not in [each.pid for each in descendants()]


def test_a_command_asks_through_a_port_that_is_forwarded_and_nothing_is_left(
    folder: Path, control: str, capsys: Capture
) -> None:
    (folder / "upstream").write_text(control)
    assert main(["top", "-n", "serving", "--context", "there"]) == 0
    assert "588 tok/s" in capsys.readouterr().out
    assert (folder / "asked").read_text().splitlines() == [
        "--context=there --namespace=serving get servingclusters.baton.dev --output json",
        "--context=there --namespace=serving get secret default-identity-operator "
        "--namespace=serving --output json",
        "--context=there --namespace=serving --namespace serving port-forward "
        "--pod-running-timeout 10s --address 127.0.0.1 service/default-control :7101",
    ]
    assert has_ended(folder)


def test_a_port_that_cannot_be_forwarded_is_told_in_kubectls_words(
    folder: Path, capsys: Capture
) -> None:
    (folder / "refusal").write_text("error: unable to forward port because pod is not running")
    assert main(["status"]) == 3
    first, second = capsys.readouterr().err.splitlines()
    assert first == (
        "kubectl baton: service/default-control: unable to forward port because pod is not running"
    )
    assert "get pods,service" in second
    assert has_ended(folder)


def test_who_may_not_read_the_operators_identity_is_told_so(folder: Path, capsys: Capture) -> None:
    (folder / "secret.json").unlink()
    assert main(["status"]) == 3
    told = capsys.readouterr().err
    assert "secrets is forbidden" in told
    assert NEEDED in told
    assert identity_secret(cluster("default")) == "default-identity-operator"
    by_tls = cluster("default") | {"spec": {"internalTLS": {}}}
    assert identity_secret(by_tls) == "default-internal-operator"


def test_routers_that_serve_by_tls_are_asked_by_tls(folder: Path, capsys: Capture) -> None:
    by_tls = cluster("default", {"grpc": f"grpcs://{ENDPOINTS['grpc']}"})
    (folder / "clusters.json").write_text(json.dumps({"items": [by_tls]}))
    router = SmallRouter(Book())  # in plain text: a handshake with it fails
    (folder / "upstream").write_text(router.address)
    try:
        assert main(["explain", "--raw", "who?"]) == 3
    finally:
        router.stop()
    assert "--tls-ca" in capsys.readouterr().err
    assert has_ended(folder)


@pytest.mark.full
def test_a_watch_that_is_ended_ends_what_it_started(folder: Path, control: str) -> None:
    (folder / "upstream").write_text(control)
    command = [sys.executable, "-m", "cli.kubectl", "top", "--watch"]
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 0)):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, env=dict(os.environ), preexec_fn=default_signals
        ) as plugin:
            assert plugin.stdout is not None
            assert plugin.stdout.readline() == b"Pools\n"
            started: set[Process] = descendants(plugin.pid)
            assert started
            plugin.send_signal(number)
            assert plugin.wait(20) == code
        assert not wait_until_gone(started, 5)


# --- preflight ------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1])
def test_the_preflight_shows_what_each_pod_of_helms_test_found(
    folder: Path, capsys: Capture, code: int
) -> None:
    helm = folder / "bin" / "helm"
    helm.write_text(f'#!/bin/sh\necho "helm $@" >> {folder}/asked\nexit {code}\n')
    helm.chmod(0o700)
    of_helm = cluster("default")
    of_helm["metadata"]["annotations"] = {"meta.helm.sh/release-name": "mine"}
    (folder / "clusters.json").write_text(json.dumps({"items": [of_helm]}))
    placed = {"metadata": {"name": "pod-a"}, "spec": {"nodeName": "node-a"}}
    waiting = {"message": "0/2 nodes are available"}
    pending = {"metadata": {"name": "pod-b"}, "spec": {}, "status": {"conditions": [waiting]}}
    (folder / "pods.json").write_text(json.dumps({"items": [pending, placed]}))
    (folder / "log").write_text("pair  PASS  node-a to node-b")
    assert main(["preflight", "--context", "there"]) == code
    assert capsys.readouterr().out.split("\n\n")[:2] == [
        "pod-a on node-a\npair  PASS  node-a to node-b",
        "pod-b\nFAIL  on no node: 0/2 nodes are available",
    ]
    asked = (folder / "asked").read_text()
    assert "helm test mine --namespace=serving --timeout=900s --kube-context=there" in asked
    assert "component=preflight,app.kubernetes.io/instance=mine --namespace=serving" in asked


# --- two units ------------------------------------------------------------------------------------


def with_units(*codes: str) -> dict[str, Any]:
    there = cluster("default", ENDPOINTS)
    there["status"]["rollout"] = {"state": "Shifting", "units": dict.fromkeys(codes, "50%")}
    return there


def test_each_unit_has_a_service_of_its_head_while_there_are_two() -> None:
    assert heads(cluster("default", ENDPOINTS)) == {}
    assert heads(with_units("b2x4z", "k7mnp")) == {
        "b2x4z": Target("serving", "default-b2x4z-head-svc", 7101),
        "k7mnp": Target("serving", "default-k7mnp-head-svc", 7101),
    }


@pytest.mark.parametrize("is_reached", [True, False])
def test_both_units_are_asked_and_one_that_is_not_reached_is_silent(
    is_reached: bool, folder: Path, capsys: Capture
) -> None:
    (folder / "clusters.json").write_text(json.dumps({"items": [with_units("b2x4z", "k7mnp")]}))
    small = SmallControl()
    small.units = [
        control_pb2.Unit(code="b2x4z", control_address="b2x4z.svc:7101", share=0.75),
        control_pb2.Unit(code="k7mnp", control_address="k7mnp.svc:7101", share=0.25),
    ]
    with small.serve() as address:
        (folder / "upstream").write_text(address)
        if not is_reached:
            (folder / "refusal-default-k7mnp-head-svc").write_text("error: no pods are ready")
        assert main(["status"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["b2x4z", "75%", "1"] in lines
    assert ["k7mnp", "25%", "1" if is_reached else "silent"] in lines
    asked = (folder / "asked").read_text().splitlines()[2:]
    assert [line.split()[-2] for line in asked] == [
        "service/default-b2x4z-head-svc", "service/default-k7mnp-head-svc"
    ]  # fmt: skip
    assert has_ended(folder)


# --- straight to an address -----------------------------------------------------------------------


def test_an_address_is_asked_without_kubectl(
    control: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["status", "--address", control]) == 0
    assert "decode-0" in capsys.readouterr().out
    assert main(["drain", "decode-0", "--no-wait", "--address", control]) == 0
    assert main(["drain", "--address", control, "decode-7", "--no-wait"]) == 1
    assert "`kubectl baton status` lists pools and workers." in capsys.readouterr().err


def test_a_prompt_is_explained_by_a_router() -> None:
    book = Book()
    router = SmallRouter(book)
    try:
        assert main(["explain", "--raw", "who?", "--address", router.address]) == 0
    finally:
        router.stop()


def test_without_kubectl_an_address_is_asked_for(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["status"]) == 3
    told = capsys.readouterr().err
    assert "kubectl is not on PATH" in told
    assert "--address" in told


def test_nothing_at_the_address_is_told_in_kubectls_terms(capsys: Capture) -> None:
    assert main(["status", "--address", "127.0.0.1:1"]) == 3
    told = capsys.readouterr().err
    assert told.startswith("kubectl baton: ")
    assert "baton up" not in told


def test_each_command_tells_its_own_options(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["drain", "--help"])
    assert ended.value.code == 0
    assert "usage: kubectl baton drain" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert main([]) == 2
    assert "explain: PROMPT" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["up"])
