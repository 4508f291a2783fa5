"""`baton up` checks the ports that it is to listen on before it starts anything."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.main import main
from cluster.local.process_tree import descendants

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("control.port", {}),
        ("router.port", {"reuse_port": True}),
        ("router.http.port", {"reuse_port": True}),
        ("router.metrics.port", {}),
        ("router.health_port", {}),
        ("worker.port", {}),
        ("worker.metrics_port", {}),
    ],
)
def test_up_names_any_port_that_is_taken_before_it_starts_anything(
    key: str, setting: dict[str, object], tmp_path: Path, capsys: Capture
) -> None:
    section, *inner, name = key.split(".")
    sections: dict[str, dict[str, Any]] = {"control": {"port": 0}, "router": {"port": 0}}
    sections["router"] |= {"http": {"port": 0}, "metrics": {}}
    sections["pools"] = {"only": {"role": "mixed"}}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sections[section] = sections.get(section, {}) | setting
        (sections[section][inner[0]] if inner else sections[section])[name] = port
        (file := tmp_path / "cluster.yaml").write_text(yaml.safe_dump(sections))
        before = descendants()
        assert main(["up", "-f", str(file)]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in shown
    assert f"choose another {key}" in shown
    assert descendants() == before


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (
            "router: {port: PORT, http: {port: 0}}\ncontrol: {port: PORT}",
            "control.port and router.port",
        ),
        (
            "router: {port: PORT, http: {port: 0}, reuse_port: true, metrics: {port: PORT}}",
            "router.port and router.metrics.port",
        ),
        (
            "control: {host: 0.0.0.0, port: PORT}\nworker: {metrics_port: PORT}\n"
            "router: {port: 0, http: {port: 0}}",
            "control.port and worker.metrics_port",
        ),
        ("router: {port: PORT, http: {port: PORT}}", "router.port and router.http.port"),
        (
            "control: {host: 127.0.0.1, port: PORT}\n"
            "router: {host: localhost, port: PORT, http: {port: 0}}",
            "control.port and router.port",
        ),
        (
            "control: {host: localhost, port: 0}\nrouter: {port: PORT, http: {port: 0}}\n"
            "worker: {metrics_port: PORT}",
            "router.port and worker.metrics_port",
        ),
    ],
)
def test_up_names_which_two_settings_name_one_port_before_it_starts_anything(
    text: str, keys: str, tmp_path: Path, capsys: Capture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = text.replace("PORT", str(port)) + "\npools: {only: {role: mixed}}\nmodel: /nowhere\n"
    (file := tmp_path / "cluster.yaml").write_text(text)
    assert main(["up", "-f", str(file)]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert f"{keys} are both {port}: choose another" in shown


@pytest.mark.parametrize("name", ["port", "metrics_port"])
def test_up_says_that_workers_of_one_machine_cannot_share_a_port(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    (file := tmp_path / "cluster.yaml").write_text(f"worker: {{{name}: 9100}}\n")
    assert main(["up", "-f", str(file)]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert f"worker.{name}: 2 workers on one machine cannot share port 9100" in shown
