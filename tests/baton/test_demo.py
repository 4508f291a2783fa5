"""`baton demo` for real, and what it asks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton.errors import ConfigError
from cli.demo import FOR_ANY_MODEL, read_prompts
from cluster.local.process_tree import Process, descendants, still_alive

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "demo"
BATON = [sys.executable, "-m", "cli.main"]


@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_the_demo_answers_with_the_shipped_model_and_leaves_no_process(tmp_path: Path) -> None:
    prompts = read_prompts(SHIPPED)
    processes: set[Process] = set()
    with (tmp_path / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            [*BATON, "demo"], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=tmp_path
        )
    assert process.stdout is not None
    shown = ""
    with process:
        for line in process.stdout:
            shown += line
            processes |= descendants(process.pid)
    assert process.returncode == 0, shown + (tmp_path / "errors.txt").read_text()
    assert len(prompts) == 8
    for prompt in prompts:
        assert f"> {prompt.question}\n" in shown
    for answer in ("The baker of Willowmere is Mira.\n", "Your name is Milo.\n"):
        assert answer in shown
    costs = re.findall(r"prefill-0 +decode-0 +(\d+) tok +(\d+) tok ", shown)
    assert len(costs) == 8
    assert [int(cached) for _, cached in costs[:-1]] == [0] * 7
    prompt_tokens, cached_tokens = map(int, costs[-1])  # the long text, asked about a second time
    assert 1000 < cached_tokens < prompt_tokens
    assert len(processes) > 5
    assert not still_alive(processes)


def test_a_models_own_prompts_are_asked(tmp_path: Path) -> None:
    assert read_prompts(tmp_path) is FOR_ANY_MODEL
    file = tmp_path / "prompts.yaml"
    file.write_text(
        "- {name: a, max_tokens: 5, messages: [{role: system, content: s}, "
        "{role: user, content: q}]}\n"
    )
    (prompt,) = read_prompts(tmp_path)
    assert (prompt.question, prompt.max_tokens, prompt.temperature) == ("q", 5, 0.0)
    assert [turn.content for turn in prompt.context] == ["s"]
    file.write_text("- {name: a, mesages: []}\n")
    with pytest.raises(ConfigError, match=r"prompts.yaml: \[0\].mesages: .*'messages'"):
        read_prompts(tmp_path)


def test_the_shipped_models_prompts_can_be_read() -> None:
    prompts = read_prompts(SHIPPED)
    assert prompts is not FOR_ANY_MODEL
    assert prompts[-1].context == prompts[-2].context
