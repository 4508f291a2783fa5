"""`baton generate`, `baton chat`, `baton explain`: everything asked of a router."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from rich.text import Text

from baton import render
from baton.client import Client
from baton.client.credentials import Tls, token_in
from baton.client.events import Event, Finished, HandedOff, Routed, Tokens
from baton.client.request_stream import GenerateOptions, build_request
from baton.errors import BatonError, InvalidRequestError, UnavailableError
from baton.finish_reason import FinishReason
from baton.v1 import router_pb2
from cli.progress import spinner

# --- what an answer cost --------------------------------------------------------------------------


_COLUMNS = (
    ("prefilled by", 14),
    ("decoded by", 14),
    (">prompt", 9),
    (">cached", 9),
    (">TTFT", 9),
    (">KV moved", 10),
    (">at", 10),
    (">ITL", 9),
    (">speed", 14),
)


def cost_of(routed: Routed | None, handed_off: HandedOff | None, finished: Finished) -> Text:
    """What an answer cost: names above values, aligned from answer to answer."""
    usage, timings, moved = finished.usage, finished.timings, handed_off
    values = [
        (routed.prefill_worker or routed.decode_worker) if routed else "-",
        routed.decode_worker if routed else "-",
        f"{usage.num_prompt_tokens} tok",
        f"{usage.num_cached_tokens} tok",
        render.milliseconds(timings.ttft_ms) if timings.ttft_ms else "-",
        render.num_bytes(moved.kv_bytes) if moved else "-",
        render.bandwidth(moved.kv_bytes, moved.put_ms) if moved else "-",
        render.milliseconds(timings.itl_ms) if timings.itl_ms else "-",
        render.rate(1e3 / timings.tpot_ms if timings.tpot_ms else 0.0, "tok/s"),
    ]
    names = [name.removeprefix(">") for name, _ in _COLUMNS]
    text = Text()
    for style, cells in (("dim", names), ("cyan", values)):
        text.append("  ")
        for (name, width), cell in zip(_COLUMNS, cells):
            text.append(cell.rjust(width) if name.startswith(">") else cell.ljust(width), style)
        text.append("\n")
    text.rstrip()
    return text


# --- asking ---------------------------------------------------------------------------------------


TOKEN = "BATON_TOKEN"
"""The environment variable that holds the bearer token. Others can read a command line."""
_SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "model")


def sampling_options(arguments: argparse.Namespace) -> GenerateOptions:
    """Return the sampling options that were given on the command line."""
    options = GenerateOptions()
    for name in _SAMPLING:
        value = getattr(arguments, name, None)
        if value is not None:
            options[name] = value  # type: ignore[literal-required]
    return options


def _request(prompt: str, arguments: argparse.Namespace) -> router_pb2.GenerateRequest:
    """Make a request of the prompt as it is, or of a chat that begins with it."""
    options = sampling_options(arguments)
    if arguments.raw:
        return build_request(prompt, **options)
    options["chat"] = [{"role": "user", "content": prompt}]
    return build_request(**options)


def client_of(arguments: argparse.Namespace) -> Client:
    """Make the client that the command line asks for. Raises ConfigError for files that cannot be
    read."""
    named = ("tls_ca", "tls_cert", "tls_key", "tls_server_name")
    given = [getattr(arguments, name) for name in named]
    tls = Tls(*given) if arguments.tls or any(given) else None
    token = token_in(arguments.token_file) if arguments.token_file else os.environ.get(TOKEN)
    return Client(arguments.router, tls=tls, token=token or None)


def stream_answer(events: Generator[Event, None, None]) -> tuple[str, Text]:
    """Print an answer as it comes, thoughts to standard error. Returns its text and what it cost.
    Leaving early aborts the request."""
    of_kind: dict[type, Any] = {}
    pieces: list[str] = []
    waiting = spinner(render.err(), "waiting for the first token")
    with contextlib.closing(events), waiting:
        for event in events:
            of_kind[type(event)] = event
            if isinstance(event, Tokens):
                pieces.append(event.text)
                for out, said in ((sys.stderr, event.reasoning), (sys.stdout, event.text)):
                    if said:
                        waiting.close()
                        out.write(said)
                        out.flush()
    finished: Finished = of_kind[Finished]
    if finished.reason in (FinishReason.ABORTED, FinishReason.ERROR):
        raise BatonError(f"the request was ended by the server: {finished.reason.value}")
    text = "".join(pieces)
    if not text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    return text, cost_of(of_kind.get(Routed), of_kind.get(HandedOff), finished)


def _asked(client: Client, request: router_pb2.GenerateRequest) -> tuple[str, Text]:
    """Stream the answer of a request. Ctrl-C aborts it, then raises KeyboardInterrupt.

    It is not raised where the signal comes: within gRPC it may leave a lock of the channel held, so
    that whoever asks next waits for ever. A second ctrl-C interrupts at once.
    """
    stopped = threading.Event()

    def abort() -> None:
        with contextlib.suppress(BatonError):  # a router that cannot be reached knows by itself
            client.abort(request.request_id, request.tenant)

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, former)
        stopped.set()
        threading.Thread(target=abort, daemon=True).start()

    former = signal.signal(signal.SIGINT, stop)
    try:
        answer = stream_answer(client.run(request))
    except BatonError:
        if not stopped.is_set():
            raise
    finally:
        signal.signal(signal.SIGINT, former)
    if stopped.is_set():
        raise KeyboardInterrupt
    return answer


def _read(read: Callable[[], str]) -> str:
    """Read standard input. Raises InvalidRequestError for what is not text."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"standard input is not text: {error}", field="text") from error


def generate(arguments: argparse.Namespace) -> int:
    prompt = _read(sys.stdin.read) if arguments.prompt == "-" else arguments.prompt
    with client_of(arguments) as client:
        _, cost = stream_answer(client.run(_request(prompt, arguments)))
    if arguments.stats or render.err().is_terminal:
        render.err().print(cost, no_wrap=True)
    return 0


def chat(arguments: argparse.Namespace) -> int:
    opening = [{"role": "system", "content": arguments.system}] if arguments.system else []
    history = list(opening)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it gives input() its arrow keys
    if sys.stdin.isatty():
        render.out().print("ctrl-C stops an answer, ctrl-D leaves, /new starts over", style="dim")
    with client_of(arguments) as client:
        while True:
            try:
                line = _read_line()
                if line is None or line in ("/quit", "/exit"):
                    return 0
                if line == "/new":
                    history = list(opening)
                elif line:
                    _exchange(client, history, line, arguments)
            except KeyboardInterrupt:  # in an answer, after it, or at the prompt: the chat goes on
                if not sys.stdin.isatty():
                    raise
                render.out().print("\nstopped; ctrl-D leaves", style="dim")


def _exchange(
    client: Client, history: list[dict[str, str]], line: str, arguments: argparse.Namespace
) -> None:
    """Ask, stream, and remember both sides; an interrupted or failed exchange is forgotten.

    Raises UnavailableError if standard input is no terminal: nobody there could wait for workers or
    the router.
    """
    turns = [*history, {"role": "user", "content": line}]
    options = sampling_options(arguments)
    options["chat"] = turns
    try:
        text, cost = _asked(client, build_request(**options))
    except BatonError as error:
        if isinstance(error, UnavailableError) and not sys.stdin.isatty():
            raise
        render.err().print(f"{error.reason.lower()}: {error.message}", style="red", markup=False)
        return
    history[:] = [*turns, {"role": "assistant", "content": text}]
    if arguments.stats:
        render.err().print(cost, no_wrap=True)


def _read_line() -> str | None:
    """Return what was typed, or None at the end of the input."""
    try:
        return _read(lambda: input("> " if sys.stdin.isatty() else "")).strip()
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None


def explain(arguments: argparse.Namespace) -> int:
    with client_of(arguments) as client:
        explained = client.explain(_request(arguments.prompt, arguments))
    if explained.unit:
        render.out().print(f"unit {explained.unit}", style="dim")
    if not explained.candidates:
        render.out().print("no worker has room for this prompt now; see `baton top`")
        return 1
    terms = list({term.name: None for one in explained.candidates for term in one.terms})
    columns = ["prefill at", "decode at", ">cost", *(f">{name}" for name in terms)]
    columns += [">cached at prefill", ">at decode"]
    rows = [_candidate_row(candidate, terms) for candidate in explained.candidates]
    render.out().print(render.table("Candidates, cheapest first", columns, rows))
    return 0


def _candidate_row(candidate: router_pb2.RouteCandidate, terms: Sequence[str]) -> list[str]:
    took_ms = {term.name: render.milliseconds(term.ms) for term in candidate.terms}
    return [
        candidate.prefill_worker or "(by itself)",
        candidate.decode_worker,
        render.milliseconds(candidate.cost_ms),
        *(took_ms.get(name, "-") for name in terms),
        f"{candidate.num_cached_tokens_prefill} tok" if candidate.prefill_worker else "-",
        f"{candidate.num_cached_tokens_decode} tok",
    ]
