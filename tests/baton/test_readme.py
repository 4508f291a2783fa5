"""What the README shows is what there is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from baton.config.cluster import parse_config
from cli.main import _parser
from tests.baton.small_router import Book, SmallRouter

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_its_commands_are_understood() -> None:
    lines = [line.partition("  #")[0] for block in blocks("bash") for line in block.splitlines()]
    commands = [
        shlex.split(part) for line in lines for part in line.split("|") if "baton " in f"{part} "
    ]
    commands = [words[1:] for words in commands if words and words[0] == "baton"]
    shown = {_parser().parse_args(words).command for words in commands}
    assert " ".join(sorted(shown)) == "chat diagnose drain explain generate scale status top up"


def test_its_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets


def test_its_cluster_files_are_valid() -> None:
    config, secured = [parse_config(yaml.safe_load(text)) for text in blocks("yaml")]
    assert (ROOT / config.model).is_dir()
    assert config.pools["decode"].replicas == 2
    assert secured.router.tls is not None
    assert secured.router.auth is not None


def test_its_files_exist() -> None:
    linked = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(linked) > 8
    assert [path for path in linked if not (ROOT / path).exists()] == []


def test_its_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (each for each in blocks("python") if "baton.client" in each)
    router = SmallRouter(Book())
    try:
        exec(compile(code.replace("127.0.0.1:7100", router.address), "README.md", "exec"), {})
    finally:
        router.stop()
    assert "Finished(" in capsys.readouterr().out
