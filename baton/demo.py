"""`baton demo`: the whole path on this machine, with what each answer cost under it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from baton import render
from baton.ask import stream_answer
from baton.bring_up import check_all_gone, read_config
from baton.client import Client
from baton.process_tree import descendants
from baton.progress import Steps
from baton.request_stream import GenerateOptions

NOTES = (
    "At the old mill, Rosa bought seven apples for three coins. "
    "Tom found a blue lantern under the bridge. Box 42 belongs to Clara. In it there is a silver "
    "flute. On Monday, Peter painted a fence at the school. Nora is nine years old. She lives near "
    "the lake. She has a grey cat called Pebble. On Friday, Emma flew a kite at the market. "
    "Box 17 belongs to Oscar. In it there is a red drum. Ben likes pears and the colour green. "
    "His best friend is Lucy."
)


@dataclass(frozen=True)
class Question:
    heading: str
    prompt: str
    options: GenerateOptions


QUESTIONS = (
    Question(
        "a short prompt",
        "Tell me a story about a lost key.",
        {"max_tokens": 160, "temperature": 0.7, "seed": 7},
    ),
    Question("a question", "Who are you?", {"max_tokens": 60, "temperature": 0.0}),
    Question(
        "a long text and a question on it",
        f"{NOTES} Whose box is number 42?",
        {"max_tokens": 60, "temperature": 0.0},
    ),
    Question(
        "the same text, another question: its KV is cached",
        f"{NOTES} What is in box 17?",
        {"max_tokens": 60, "temperature": 0.0},
    ),
)


def demo(arguments: argparse.Namespace) -> int:
    from cluster.local import up

    config = read_config(arguments.file)
    with Steps(render.err()) as steps:
        steps("starting")
        with up(config, on_progress=steps) as cluster:
            steps.done()
            with Client(cluster.router_address) as client:
                for question in QUESTIONS:
                    _ask(client, question)
            processes = descendants()
            steps("stopping")
        check_all_gone(processes)
        steps.done()
    render.out().print(f"\nall {len(processes)} processes of the cluster have ended")
    return 0


def _ask(client: Client, question: Question) -> None:
    out = render.out()
    out.print(f"\n[bold]{question.heading}[/bold]")
    shown = question.prompt
    if len(shown) > 160:
        shown = f"{shown[:90]} ... {shown[-50:]}"
    out.print(f"> {shown}", style="green", markup=False)
    message = {"role": "user", "content": question.prompt}
    _, meter = stream_answer(client.generate(chat=[message], **question.options))
    out.print(meter.lines(), no_wrap=True)
