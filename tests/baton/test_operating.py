"""Every command against a cluster that `baton up` started with the shipped model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from baton.control.client import ControlClient
from baton.v1 import control_pb2
from cluster.local.process_tree import descendants, still_alive
from tests.baton.terminal import CTRL_C, CTRL_D, Terminal, default_signals

BATON = [sys.executable, "-m", "cli.main"]
BAKER = ("Who is the baker in Willowmere?", "The baker of Willowmere is Mira.\n")
# At this temperature the answer is noise, the same for the same seed, and does not end by itself.
ENDLESS = ["--temperature", "100", "--seed", "1", "--max-tokens", "1500"]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


class Cluster:
    """The addresses of a cluster that runs, and commands sent to it."""

    def __init__(self, pid: int, router: str, control: str, openai: str) -> None:
        self.pid, self.control, self.openai = pid, control, openai
        self.env = {**os.environ, "BATON_ROUTER": router, "BATON_CONTROL": control}

    def run(self, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*BATON, *arguments], env=self.env, input=text, capture_output=True, text=True,
            timeout=150, check=False,
        )  # fmt: skip

    def wait_until(self, is_so: Callable[[control_pb2.WatchFleetResponse], bool]) -> None:
        with ControlClient(self.control) as control:
            assert any(is_so(fleet) for fleet in control.watch_fleet(60.0))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    file = folder / "cluster.yaml"
    file.write_text(
        "router: {port: 0, http: {port: 0}, placement: {local_prefill: never}}\n"
        "control: {port: 0}\n"
        "pools:\n"
        "  prefill: {role: prefill}\n"
        "  decode: {role: decode, max_replicas: 3}\n"
    )
    with (folder / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            [*BATON, "up", "-f", str(file)], stdout=subprocess.PIPE, stderr=errors, text=True,
            preexec_fn=default_signals,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        router = process.stdout.readline().split()[-1]
        control = process.stdout.readline().split(";")[0].split()[-1]
        openai = process.stdout.readline().split()[-1]
        yield Cluster(process.pid, router, control, openai)
        processes = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=90) == 0, (folder / "errors.txt").read_text()
        assert len(processes) > 5
        assert not still_alive(processes)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=90)
        process.stdout.close()


def test_openai_s_api_answers_where_up_says(cluster: Cluster) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": BAKER[0]}], "temperature": 0}
    headers = {"Content-Type": "application/json"}
    url, data = f"{cluster.openai}/chat/completions", json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        message = json.load(answer)["choices"][0]["message"]
    assert message["content"] == BAKER[1].strip()


AS_NOBODY = """
import os, sys
from ray._raylet import GcsClient
os.setuid(65534)
try:
    print("served", GcsClient(sys.argv[1]).internal_kv_keys(b"", None, 20))
except Exception as error:
    print(type(error).__name__)
"""


def test_another_user_reads_nothing_of_a_cluster_and_ray_serves_loopback_to_its_own_alone(
    cluster: Cluster,
) -> None:
    parts = psutil.Process(cluster.pid).children(recursive=True)
    listening = [
        (part.name(), at.laddr.ip, at.laddr.port)
        for part in parts
        for at in part.net_connections("tcp")
        if at.status == psutil.CONN_LISTEN
    ]
    assert {ip.removeprefix("::ffff:") for _, ip, _ in listening} == {"127.0.0.1"}, listening
    (gcs,) = [part for part in parts if part.name() == "gcs_server"]
    (port,) = [port for name, _, port in listening if name == "gcs_server"]
    folder = Path(gcs.environ()["RAY_AUTH_TOKEN_PATH"]).parent  # closed to others
    assert (folder / "ray" / "session_latest").is_dir()
    asking = [sys.executable, "-c", AS_NOBODY, f"127.0.0.1:{port}"]
    for mode in ("disabled", "token"):
        env = {"PATH": os.environ["PATH"], "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "x" * 64}
        stranger = subprocess.run(asking, env=env, capture_output=True, text=True, timeout=60)
        assert stranger.stdout.split() == ["AuthenticationError"], stranger


def test_generate_answers_an_argument_and_standard_input_alike(cluster: Cluster) -> None:
    prompt, expected = BAKER
    for done in (cluster.run("generate", prompt), cluster.run("generate", "-", text=prompt)):
        assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_generate_streams(cluster: Cluster) -> None:
    with subprocess.Popen(
        [*BATON, "generate", *ENDLESS, "--max-tokens", "500", "Tell me a story"],
        env=cluster.env,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        pieces = list(iter(lambda: os.read(process.stdout.fileno(), 1 << 16), b""))
    assert process.returncode == 0
    assert sum(map(len, pieces)) > 1000
    assert len(pieces) > 5


def test_chat_remembers_and_its_second_turn_finds_the_first_in_the_cache(cluster: Cluster) -> None:
    with Terminal([*BATON, "chat", "--stats"], cluster.env) as chat:
        chat.wait_for("ctrl-D leaves")
        cached = []
        for line in ("Anna has 7 apples. Ben gives her 6 more. How many apples now?", "And now?"):
            chat.wait_for("> ")
            chat.type(f"{line}\n")
            shown = chat.wait_for(r"prefill-0 +decode-0 +\d+ tok +\d+ tok ")
            cached.append(int(shown.split()[-2]))
        chat.wait_for("> ")
        chat.type(CTRL_D)
        assert chat.exit_status() == 0
    assert cached[0] == 0
    assert cached[1] >= 16


def test_ctrl_c_stops_an_answer_and_not_the_chat(cluster: Cluster) -> None:
    with Terminal([*BATON, "chat", *ENDLESS], cluster.env) as chat:
        for _ in range(2):
            chat.wait_for("> ")
            chat.type("Tell me a story\n")
            # After the spinner, which is drawn in braille and shows the time.
            chat.wait_for(r"first token +[\d:]+\s+[^\s\d⠀-⣿]\S*\s+\S+\s")
            chat.type(CTRL_C)
            chat.wait_for("stopped")
            cluster.wait_until(
                lambda fleet: all(worker.load.num_running == 0 for worker in fleet.workers)
            )
        chat.wait_for("> ")
        chat.type(f"half a line{CTRL_C}")
        chat.wait_for("> ")
        chat.type(CTRL_D)
        assert chat.exit_status() == 0


def rows_under(title: str, shown: str) -> tuple[str, list[str]]:
    """Header and rows of one table."""
    lines = shown.split(f"{title}\n", 1)[1].split("\n\n")[0].splitlines()
    return lines[0], lines[1:]


def test_a_pool_is_scaled_out_drained_and_scaled_in(cluster: Cluster) -> None:
    done = cluster.run("scale", "decode", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "decode: 1 → 2\n"
    assert done.stderr == "decode: 1 live, 2 wanted ...\ndecode: 2 live, 2 wanted ...\n"
    assert "2 of 2" in cluster.run("status").stdout

    done = cluster.run("drain", "decode-0")
    assert (done.returncode, done.stderr) == (0, "decode-0: finishing what it runs ...\n")
    assert done.stdout == "decode-0 has left\n"
    assert cluster.run("generate", BAKER[0]).stdout == BAKER[1]

    done = cluster.run("scale", "decode", "2")  # until decode-0 serves again: else it would leave
    assert (done.returncode, done.stdout) == (0, "decode: 2 → 2\n")
    done = cluster.run("scale", "decode", "1")
    assert (done.returncode, done.stdout) == (0, "decode: 2 → 1\n")
    assert ", 1 leaving ...\n" in done.stderr
    shown = cluster.run("status").stdout
    assert "draining" not in shown
    (gone,) = [row for row in rows_under("Workers", shown)[1] if row.startswith("decode-1")]
    assert re.search(r" gone +- +0 +0 +0 tok +- +- +- +- +0 +0 of 0 blocks ", gone), gone
    assert cluster.run("generate", BAKER[0]).stdout == BAKER[1]


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["drain", "decode-7"], "no worker 'decode-7'; there are: decode-0, prefill-0"),
        (["scale", "dekode", "2"], "no pool 'dekode'; there are: prefill, decode"),
        (["scale", "decode", "4"], "must be between 0 and 3"),
        (["generate", "hi", "--model", "demon"], "unknown model 'demon'; served here: demo"),
    ],
)
def test_a_mistake_is_reported_in_a_line_with_what_to_do(
    cluster: Cluster, arguments: list[str], reported: str
) -> None:
    done = cluster.run(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    first, *rest = done.stderr.splitlines()
    assert first.startswith("baton: ")
    assert reported in first
    assert len(rest) <= 1


def test_another_service_at_the_address_is_reported(cluster: Cluster) -> None:
    for arguments in (
        ("status", "--control", cluster.env["BATON_ROUTER"]),
        ("generate", "hi", "--router", cluster.control),
    ):
        done = cluster.run(*arguments)
        assert done.returncode == 3
        assert "is another service" in done.stderr
