"""A model named on the hub is fetched once, before the cluster starts, and seen to come."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from baton.config.cluster import ClusterConfig, parse_config
from baton.errors import ConfigError
from baton.model_folder import find_text_files
from cli.bring_up import Startup, read_config, with_model_folder
from cli.progress import Steps, spinner
from cluster.pools.pool_settings import choose_auto_settings
from cluster.worker.config import worker_config
from engine.engines import engine_builder
from tests.baton.small_hub import COMMIT, SmallHub, fill_cache

NAME = "baton-test/tiny"
LARGE, WEIGHTS = "model-00001-of-00001.safetensors", b"w" * 3_000_000
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    LARGE: WEIGHTS,
    "model.safetensors.index.json": b"{  }",
}
OTHERS = {
    "consolidated.safetensors": WEIGHTS,
    "consolidated-00001-of-00002.safetensors": WEIGHTS,
    "original/params.json": b"{}",
    "original/consolidated.00.safetensors": WEIGHTS,
    "onnx/model.safetensors": WEIGHTS,
    "pytorch_model.bin": WEIGHTS,
    "README.md": b"read me",
}
CONFIG = parse_config({"model": NAME})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "hub"


@contextlib.contextmanager
def online(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], revision: str = "main"
) -> Iterator[SmallHub]:
    """A hub that is asked by this process and by those that it starts."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with SmallHub(NAME, files, revision=revision) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub


def resolved(config: ClusterConfig) -> tuple[ClusterConfig, list[str], list[str]]:
    announced: list[str] = []
    details: list[str] = []
    found = with_model_folder(config, announced.append, details.append)
    return found, announced, details


def test_a_name_on_the_hub_becomes_its_folder_in_the_cache_and_stays_its_name(cache: Path) -> None:
    folder = fill_cache(cache, NAME, FILES)
    config, announced, _ = resolved(CONFIG)
    assert (config.model, config.model_name) == (str(folder), "tiny")
    assert announced == [f"fetching {NAME} from the Hugging Face hub"]


def test_a_model_that_cannot_be_fetched_is_reported_before_anything_starts(cache: Path) -> None:
    steps = Steps(Console(file=(shown := io.StringIO()), width=200))
    config = parse_config(
        {"model": NAME, "control": {"port": 0}, "router": {"port": 0, "http": {"port": 0}}}
    )
    refusal = f"{NAME} is no folder, nor can it be had from the Hugging Face hub"
    with Startup(steps) as startup, pytest.raises(ConfigError, match=refusal):
        startup.start(config)
    assert "fetching" in shown.getvalue()
    assert "Ray" not in shown.getvalue()


def test_only_what_is_read_is_fetched_and_it_is_reported_how_much_has_come(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with online(monkeypatch, FILES | OTHERS) as hub:
        config, _, details = resolved(CONFIG)
    assert sorted(hub.sent()) == sorted(FILES)
    folder = Path(config.model)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert details[-1] == "3.0 MB of 3.0 MB"


def test_a_revision_is_what_the_hub_is_asked_for(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with online(monkeypatch, FILES, revision="v2"):
        config, announced, _ = resolved(dataclasses.replace(CONFIG, model_revision="v2"))
        assert announced == [f"fetching {NAME} (v2) from the Hugging Face hub"]
        assert (Path(config.model) / "config.json").read_bytes() == b"{}"
        assert config.model_revision is None, "a folder has none"
        with pytest.raises(ConfigError, match=f"{NAME} is no folder, nor"):
            resolved(CONFIG)  # this hub has no main branch


def test_a_revision_of_what_is_not_on_the_hub_is_refused(tmp_path: Path) -> None:
    config = parse_config({"model": str(tmp_path), "model_revision": "v2"})
    with pytest.raises(ConfigError, match="model_revision is of a model on the hub"):
        resolved(config)


@pytest.mark.full  # a process that imports torch
def test_the_choice_of_a_dtype_fetches_the_revisions_config_and_no_weights(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FILES | {"config.json": b'{"dtype": "float32"}'}
    config = parse_config({"model": NAME, "model_revision": "v2", "engine": {"device": "cpu"}})
    with online(monkeypatch, files, revision="v2") as hub:
        settled, _ = choose_auto_settings(config, {"HF_ENDPOINT": hub.address})
    assert settled.engine.dtype == "float32"
    assert hub.sent() == ["config.json"]


def test_a_workers_engine_has_the_revision_that_its_cluster_names(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = fill_cache(cache, NAME, FILES, revision="v2")
    config = parse_config({"model": NAME, "model_revision": "v2"})
    worker = worker_config(config, "decode", "decode-0", "127.0.0.1:1")
    found = engine_builder(worker.engine).find_model(config.model, worker.cluster.model_revision)
    assert found == str(folder)


ROOT = Path(__file__).resolve().parents[2]


def in_a_pod(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """What a worker pod's init container runs."""
    return subprocess.Popen(
        [sys.executable, "-m", "baton.fetch", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_no_link_leads_out_of_a_model_s_folder_but_to_its_own_blobs(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    for name in ("a/tiny", "a/other"):
        fill_cache(hub, name, {"tokenizer.json": b"{}", "chat_template.jinja": b"hi"})
    folder, other = (hub / f"models--a--{name}/snapshots/{COMMIT}" for name in ("tiny", "other"))
    template = folder / "chat_template.jinja"
    assert template in find_text_files(folder)
    (tmp_path / "secret").write_text("root:x")
    (folder / "../../blobs/link").symlink_to(tmp_path / "secret")
    outside = [tmp_path / "secret", "../../../../secret", other / "chat_template.jinja"]
    for target in (*outside, "../../blobs/link", "chat_template.jinja"):
        template.unlink()
        template.symlink_to(target)
        with pytest.raises(ConfigError, match=r"chat_template\.jinja.* (leads out|cannot be read)"):
            find_text_files(folder)
    template.unlink()
    template.symlink_to("tokenizer.json")
    assert template in find_text_files(folder)


def test_what_a_pod_has_fetched_its_workers_find_without_the_hub(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--name", NAME, "--revision", "v2")
    with SmallHub(NAME, FILES, revision="v2") as hub:
        process = in_a_pod(*arguments, HF_HUB_OFFLINE="0", HF_ENDPOINT=hub.address)
        reported, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "3.0 MB of 3.0 MB" in reported.splitlines()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = engine_builder(CONFIG.engine).find_model(NAME, "v2")
    assert (Path(folder) / LARGE).read_bytes() == WEIGHTS
    again = in_a_pod(*arguments)  # offline
    reported, errors = again.communicate(timeout=60)
    assert (again.returncode, reported.splitlines()[-1]) == (0, f"it is in {folder}"), errors


@pytest.mark.parametrize(
    ("name", "status", "output"),
    [
        (NAME, 1, f"cannot fetch the model: {NAME} is no folder, nor can it be had"),
        ("/", 1, "cannot fetch the model: / holds no config.json"),
        ("models/demo", 0, "models/demo is there"),  # though it could be a name on the hub
    ],
)
def test_a_pod_starts_with_a_folder_of_its_image_and_ends_without_a_model(
    name: str, status: int, output: str, cache: Path
) -> None:
    process = in_a_pod("--name", name)
    reported, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert (errors if status else reported).startswith(output)


def test_a_pod_that_is_ended_does_not_wait_for_a_file_that_is_still_coming(cache: Path) -> None:
    with SmallHub(NAME, FILES) as hub:
        hub.stop_half_way(LARGE)
        process = in_a_pod("--name", NAME, HF_HUB_OFFLINE="0", HF_ENDPOINT=hub.address)
        assert process.stdout is not None
        while " of 3.0 MB" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)  # its pipes are closed: nobody is left who fetches
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("model", ["/", "no such/folder/at all"])
def test_what_is_a_folder_or_no_name_is_not_looked_for(model: str) -> None:
    config = parse_config({"model": model})
    assert resolved(config) == (config, [], [])


def test_a_home_folder_is_found_from_the_command_line_and_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    (file := tmp_path / "cluster.yaml").write_text("model: ~/weights\n")
    assert read_config(str(file)).model == str(tmp_path / "weights")
    assert read_config(None, "~/weights").model == str(tmp_path / "weights")


def test_how_far_a_step_has_come_is_reported_on_its_line() -> None:
    for is_terminal in (True, False):
        console = Console(file=(shown := io.StringIO()), force_terminal=is_terminal, width=60)
        with Steps(console) as steps:
            steps("fetching")
            steps.detail("1 of 3 GB")
        assert "fetching: 1 of 3 GB" in shown.getvalue()


def test_a_wait_is_shown_with_its_time_on_a_terminal_alone() -> None:
    for is_terminal in (True, False):
        console = Console(
            file=(shown := io.StringIO()), force_terminal=is_terminal, _environ={"TERM": "xterm"}
        )
        with spinner(console, "waiting") as waiting:
            waiting.close()
        assert ("0:00:00" in shown.getvalue()) == is_terminal
        assert shown.getvalue() == "" or is_terminal
