"""`baton demo`: the whole path on this machine, with what each answer cost under it."""

from __future__ import annotations

import argparse
import dataclasses
import time

from rich.text import Text

from baton import render
from baton.client import Client
from baton.config.cluster import ClusterConfig
from baton.errors import ConfigError
from cli.ask import stream_answer
from cli.bring_up import Startup, check_all_gone, read_config
from cli.demo_prompts import DemoPrompt, Turn, read_prompts
from cli.progress import Steps
from cluster.local.process_tree import descendants


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
            num_processes = len(descendants())
            _introduce(config.model_name, num_processes, time.monotonic() - began)
            with Client(cluster.router_address) as client:
                told: set[tuple[Turn, ...]] = set()
                for prompt in prompts:
                    _ask(client, prompt, is_known=prompt.context in told)
                    told.add(prompt.context)
            processes = descendants()
            steps("stopping")
        check_all_gone(processes)
        steps.done()
    render.out().print(f"done; none of its {len(processes)} processes is left", style="dim")
    return 0


def _for_show(config: ClusterConfig) -> ClusterConfig:
    """On free ports, for a cluster that is up is no hindrance; every prompt is handed over; on the
    CPU, since two pools would need two GPUs."""
    return dataclasses.replace(
        config,
        engine=dataclasses.replace(config.engine, device="cpu"),
        router=dataclasses.replace(config.router, port=0, local_prefill="never"),
        control=dataclasses.replace(config.control, port=0),
    )


def _introduce(model: str, num_processes: int, elapsed_s: float) -> None:
    render.out().print(
        f"{model} is served by {num_processes} processes after {elapsed_s:.1f} s\n", style="dim"
    )


def _ask(client: Client, prompt: DemoPrompt, *, is_known: bool) -> None:
    out = render.out()
    out.print(_heading(prompt, is_known=is_known))
    messages = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
    events = client.generate(
        chat=messages, max_tokens=prompt.max_tokens, temperature=prompt.temperature
    )
    _, meter = stream_answer(events)
    out.print(meter.lines(), no_wrap=True)
    out.print()


def _heading(prompt: DemoPrompt, *, is_known: bool) -> Text:
    """The question, with what comes before it in short."""
    text = Text()
    for turn in prompt.context:
        if turn.role == "system":
            length = f"{len(turn.content.split())} words"
            what = f"the same text of {length} again" if is_known else f"a text of {length}"
            text.append(f"  ({what})\n", "dim")
        else:
            mark = ">" if turn.role == "user" else " "
            text.append(f"{mark} {turn.content}\n", "dim")
    return text.append(f"> {prompt.question}", "bold green")
