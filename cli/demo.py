"""`baton demo`: the whole path on this machine, with what each answer cost under it.

It asks a model's own prompts.yaml, or a few prompts for any chat model.
"""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from baton import render
from baton.client import Client
from baton.config import settings
from baton.config.cluster import ClusterConfig
from baton.config.settings import changed
from baton.errors import ConfigError
from cli.ask import stream_answer
from cli.bring_up import Startup, check_all_gone, read_config
from cli.progress import Steps
from cluster.local.process_tree import descendants

# --- what it asks ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    role: str
    content: str


@dataclass(frozen=True)
class DemoPrompt:
    """One request; the last message is the question, what comes before is its context."""

    name: str
    messages: tuple[Turn, ...]
    max_tokens: int = 128
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("messages must not be empty")

    @property
    def question(self) -> str:
        return self.messages[-1].content

    @property
    def context(self) -> tuple[Turn, ...]:
        return self.messages[:-1]


_NOTES = (
    "Here is the village newspaper. At the old mill, Rosa bought seven apples for three coins. "
    "Tom found a blue lantern under the bridge. Box 42 belongs to Clara. In it there is a silver "
    "flute. On Monday, Peter painted a fence at the school. Nora is nine years old. She lives near "
    "the lake. She has a grey cat called Pebble. On Friday, Emma flew a kite at the market. "
    "Box 17 belongs to Oscar. In it there is a red drum. Ben likes pears and the colour green. "
    "His best friend is Lucy."
)

FOR_ANY_MODEL = (
    DemoPrompt("story", (Turn("user", "Tell me a short story about a lost key."),), 160),
    DemoPrompt("box", (Turn("system", _NOTES), Turn("user", "Whose box is number 42?")), 48),
    DemoPrompt("cat", (Turn("system", _NOTES), Turn("user", "What is Nora's cat called?")), 48),
)


def read_prompts(model: str | Path) -> tuple[DemoPrompt, ...]:
    """Read a model's own prompts. Raises ConfigError when its prompts.yaml is wrong."""
    path = Path(model) / "prompts.yaml"
    if not path.is_file():
        return FOR_ANY_MODEL
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{path}: a list of prompts is expected")
    return tuple(
        settings.parse(DemoPrompt, entry, source=str(path), key=f"[{index}]")
        for index, entry in enumerate(value)
    )


# --- how it asks ----------------------------------------------------------------------------------

_CONTEXT_WIDTH = 80


def demo(arguments: argparse.Namespace) -> int:
    config = read_config(arguments.file)
    if config.router.tls is not None or config.router.auth is not None:
        raise ConfigError(
            "router: `baton demo` asks in plain text and without a token: leave tls and auth out, "
            "or use `baton up` and `baton generate`",
            field="router",
        )
    if arguments.file is None:
        config = _for_show(config)
    prompts = read_prompts(config.model)
    began = time.monotonic()
    with Steps(render.err()) as steps, Startup(steps) as startup:
        with startup.start(config) as cluster:
            steps.done()
            served = f"{config.model_name} is served by {len(descendants())} processes"
            render.out().print(f"{served} after {time.monotonic() - began:.1f} s\n", style="dim")
            with Client(cluster.router_address) as client:
                for prompt in prompts:
                    _ask(client, prompt)
            processes = descendants()
            steps("stopping")
        check_all_gone(processes)
        steps.done()
    render.out().print(f"done; none of its {len(processes)} processes is left", style="dim")
    return 0


def _for_show(config: ClusterConfig) -> ClusterConfig:
    """Use free ports, since another cluster may be up, and the CPU, since two pools would need two
    GPUs. Hand every prompt over."""
    return dataclasses.replace(
        config,
        engine=dataclasses.replace(config.engine, device="cpu"),
        router=changed(
            config.router, port=0, http={"port": None}, placement={"local_prefill": "never"}
        ),
        control=dataclasses.replace(config.control, port=0),
    )


def _ask(client: Client, prompt: DemoPrompt) -> None:
    """Print the question after the beginning of its context, and the answer with its cost."""
    out = render.out()
    for turn in prompt.context:
        began = textwrap.shorten(turn.content, _CONTEXT_WIDTH, placeholder=" ...")
        out.print(f"  ({turn.role}: {began})", style="dim", markup=False)
    out.print(f"> {prompt.question}", style="bold green", markup=False)
    messages = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
    events = client.generate(
        chat=messages, max_tokens=prompt.max_tokens, temperature=prompt.temperature
    )
    _, cost = stream_answer(events)
    out.print(cost, no_wrap=True)
    out.print()
