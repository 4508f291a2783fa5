"""The command line, against a router and a registry over real gRPC."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import InvalidRequestError
from cli.main import main
from tests.baton.small_router import Book, SmallControl, SmallRouter, answer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def router(book: Book) -> Iterator[str]:
    served = SmallRouter(book)
    yield served.address
    served.stop()


Capture = pytest.CaptureFixture[str]


def test_generate_streams_the_answer_alone_to_standard_output(
    router: str, book: Book, capsys: Capture
) -> None:
    assert main(["generate", "hello", "--router", router, "--seed", "3", "--max-tokens", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.out == answer(3, 4) + "\n"
    assert captured.err == ""
    (message,) = book.requests[0].chat.messages
    assert (message.role, message.content) == ("user", "hello")


def test_generate_sends_raw_text_and_reads_standard_input(
    router: str, book: Book, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert main(["generate", "-", "--raw", "--router", router, "--stop", "a", "--stop", "b"]) == 0
    assert book.requests[0].text == "from a pipe"
    assert list(book.requests[0].stop) == ["a", "b"]


@pytest.mark.parametrize("command", [["generate", "-", "--raw"], ["chat"]])
def test_standard_input_that_is_not_text_is_refused(
    command: list[str], router: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8", errors="strict")
    monkeypatch.setattr("sys.stdin", stdin)
    assert main([*command, "--router", router]) == 1
    assert "standard input is not text" in capsys.readouterr().err


def test_what_an_answer_cost_is_reported_in_aligned_columns(router: str, capsys: Capture) -> None:
    assert main(["generate", "hello", "--router", router, "--stats"]) == 0
    names, values = capsys.readouterr().err.rstrip().splitlines()
    assert "prefill-0" in values
    for name, value in [
        ("prompt", "212 tok"),
        ("cached", "192 tok"),
        ("TTFT", "12.5 ms"),
        ("KV moved", "2.0 MB"),
        ("at", "4.0 GB/s"),
        ("ITL", "5.0 ms"),
        ("speed", "50 tok/s"),
    ]:
        assert names.index(f" {name}") + 1 + len(name) == values.index(value) + len(value)


def test_chat_remembers_both_sides_and_can_start_over(
    router: str, book: Book, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n\n/new\nthree\n/quit\nnever\n"))
    arguments = ["chat", "--router", router, "--seed", "1", "--max-tokens", "2", "--system", "be"]
    assert main(arguments) == 0
    said = [[m.content for m in request.chat.messages] for request in book.requests]
    assert said == [["be", "one"], ["be", "one", answer(1, 2), "two"], ["be", "three"]]


def test_a_chat_without_a_router_ends_with_what_to_do(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert main(["chat", "--router", "127.0.0.1:1"]) == 3
    reported = capsys.readouterr().err
    assert reported.count("no router listens at 127.0.0.1:1") == 1
    assert "Is the cluster up? Start one with `baton up`" in reported


def test_a_split_that_leaves_no_worker_for_a_role_is_reported_as_not_in_force(
    control: str, capsys: Capture
) -> None:
    for prefill, decode, is_reported in ((1, 1, True), (0, 0, False)):
        plan = ["--prefill", str(prefill), "--decode", str(decode)]
        assert main(["roles", "decode", *plan, "--control", control]) == 0
        reported = "too few workers (1) for both roles, so all act as both"
        assert (reported in capsys.readouterr().out) is is_reported


def test_status_shows_pools_and_workers(control: str, capsys: Capture) -> None:
    assert main(["status", "--control", control]) == 0
    shown = capsys.readouterr().out
    for part in (
        "Pools",
        "decode-0",
        "live",
        "50%",
        "0 of 1024 blocks",
        "8,123 tok/s",
        "5.1 ms",
        "4.2 GB/s",
    ):
        assert part in shown


def test_scale_waits_until_the_pool_has_its_size(control: str, capsys: Capture) -> None:
    assert main(["scale", "decode", "3", "--control", control]) == 0
    captured = capsys.readouterr()
    assert "decode: 1 → 3" in captured.out
    assert captured.err.endswith("decode: 3 live, 3 wanted ...\n")
    assert main(["status", "--control", control]) == 0
    assert "decode-2" in capsys.readouterr().out


def test_drain_waits_until_the_worker_is_gone(control: str, capsys: Capture) -> None:
    assert main(["drain", "decode-0", "--control", control]) == 0
    assert main(["status", "--control", control]) == 0
    assert "gone" in capsys.readouterr().out


def test_a_size_beyond_the_wire_is_refused(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["scale", "decode", "99999999999"])
    assert "'99999999999' is not a whole number" in capsys.readouterr().err


def test_explain_shows_every_candidate_cheapest_first(router: str, capsys: Capture) -> None:
    assert main(["explain", "hello", "--router", router]) == 0
    shown = capsys.readouterr().out
    assert shown.index("14.2 ms") < shown.index("1.4 s")
    assert "(by itself)" in shown
    assert "unit a/0123" in shown


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["generate", "x", "--router", "127.0.0.1:1"], "no router listens at 127.0.0.1:1"),
        (["generate", "x", "--router", "no-such.invalid:1"], "no router listens at no-such.inv"),
        (["explain", "x", "--router", "127.0.0.1:1"], "nothing listens at 127.0.0.1:1"),
        (["status", "--control", "127.0.0.1:1"], "nothing listens at 127.0.0.1:1"),
        (["drain", "x", "--control", "127.0.0.1:1"], "nothing listens at 127.0.0.1:1"),
    ],
)
def test_nothing_at_the_address_says_what_to_do(
    command: list[str], problem: str, capsys: Capture
) -> None:
    assert main(command) == 3
    shown = capsys.readouterr().err
    assert problem in shown
    assert "baton up" in shown
    assert command[2] in shown


def test_a_refused_request_is_reported_and_fails(capsys: Capture) -> None:
    served = SmallRouter(Book(), fail=InvalidRequestError("no chat template", field="chat"))
    try:
        assert main(["generate", "hello", "--router", served.address]) == 1
    finally:
        served.stop()
    shown = capsys.readouterr().err
    assert "no chat template" in shown
    assert "--raw" in shown


def test_a_misspelt_key_in_a_cluster_file_is_wrong_usage(
    tmp_path: os.PathLike[str], capsys: Capture
) -> None:
    file = os.path.join(tmp_path, "cluster.yaml")
    with open(file, "w") as out:
        out.write("engine: {block_sise: 16}\n")
    assert main(["up", "-f", file]) == 2
    assert "did you mean 'block_size'?" in capsys.readouterr().err


def test_a_folder_without_a_model_is_reported_before_anything_starts(
    tmp_path: os.PathLike[str], capsys: Capture
) -> None:
    assert main(["up", "--model", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert "tokenizer.json: missing" in shown
    assert "Ray" not in shown


def test_baton_alone_says_what_it_can_do(capsys: Capture) -> None:
    assert main([]) == 2
    reported = capsys.readouterr().err
    assert "start a cluster on this machine" in reported
    assert "let a worker finish what it runs" in reported


def test_the_installed_command_prints_the_version_of_the_project() -> None:
    command = Path(sys.executable).with_name("baton")
    reported = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (reported.returncode, reported.stdout) == (0, f"baton {project['version']}\n"), (
        reported.stderr
    )


def test_a_checkout_that_is_not_installed_has_no_version(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("importlib.metadata.MetadataPathFinder.find_distributions", lambda _: ())
    assert main(["--version"]) == 2
    assert "baton: baton-serve is not installed, so it has no version" in capsys.readouterr().err


def test_scaling_a_pool_whose_workers_do_not_start_says_why(capsys: Capture) -> None:
    with SmallControl(failing="out of memory").serve() as address:
        assert main(["scale", "decode", "2", "--control", address]) == 1
    assert "the decode pool does not start: out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["scale", "decode", "-1"], "argument N: '-1' is not a whole number"),
        (["scale", "decode", "1.5"], "argument N: '1.5' is not a whole number"),
        (["status", "--control", "localhost"], "'localhost' is not HOST:PORT"),
        (
            ["generate", "hi", "--router", "127.0.0.1:7100,localhost"],
            "'localhost' is not HOST:PORT",
        ),
        (["size", ".", "--tp", "0"], "argument --tp: '0' is not above 0"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        *(
            (
                ["drain", "x", f"--timeout={text}"],
                f"argument --timeout: '{text}' is not a number of",
            )
            for text in ("inf", "nan", "0", "-1", "1e300", "soon")
        ),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], problem: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


def test_interrupting_an_answer_aborts_it_and_exits_quietly(book: Book) -> None:
    hold = threading.Event()
    served = SmallRouter(book, hold=hold)
    command = [sys.executable, "-m", "cli.main", "generate", "hi", "--router", served.address]
    try:
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Tests run in the background have SIGINT ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:
            assert process.stdout is not None
            assert process.stdout.read(4)  # it streams
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
    finally:
        hold.set()
        served.stop()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert book.aborted == [book.requests[0].request_id]


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        (
            "from cli.main import main; main(['generate', 'hi', '--router', ROUTER])",
            ["torch", "ray", "tokenizers", "numpy", "engine"],
        ),
        ("import router.__main__", ["torch", "ray", "transformers"]),
        ("import deploy.controller.__main__", ["torch", "ray", "transformers"]),
    ],
    ids=["asking", "router", "operator"],
)
def test_nobody_imports_what_is_large_and_not_needed(
    router: str, code: str, unwanted: list[str]
) -> None:
    script = f"{code.replace('ROUTER', repr(router))}; import sys; "
    script += f"print([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_command_whose_packages_are_not_installed_says_which_extra_has_them() -> None:
    script = """
import sys
class NoRay:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoRay())
from cli.main import main
sys.exit(main(["up"]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2, ended.stderr
    assert "`baton up` needs ray, which is not installed" in ended.stderr
    assert "pip install 'baton-serve[worker]'" in ended.stderr
