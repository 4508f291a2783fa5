"""What the router itself costs, beside what it could cost.

Client, servers and workers are processes on loopback. Workers compute nothing: the first token
comes at once, a further one each step. Rounds go over all servers in turn. Medians; p90 is over
requests for TTFT, else over rounds.

- direct: the client does with the workers what the router does, over the same link. No router can
  save that. direct HTTP: the same for the HTTP worker behind sglang-router.
- null server: bare grpc.aio that answers with the router's messages: what client and gRPC cost.
- bare proxy: bare grpc.aio that passes a null server's messages on.
- router: Baton's, over gRPC and over OpenAI's HTTP API, each with 400 letters or as many ids.
- sglang-router: of the Python that --sglang-python names. It takes ids at `/generate`.

"added" is to the row below it: direct, the null server (proxy), direct HTTP (sglang-router). CPU is
that of the server's processes, known to 10 ms a run. Fewer than one message a token: the server
was behind, and put tokens together. Rates are over one connection, HTTP's over 64. System calls
are counted in one run with steps of 50 ms, since strace slows the server. HTTP's client
acknowledges at once (TCP_QUICKACK): sglang-router's sockets lack TCP_NODELAY, and would wait 40 ms.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import uvloop

from bench.clients import NEW_EACH, Client, GrpcClient, HttpClient, LinkClient, Load, Run, run
from bench.report import describe, markdown, progress
from bench.servers import (
    BatonRouter,
    FreeWorkers,
    HttpWorker,
    NullServer,
    Proxy,
    Server,
    SglangRouter,
    Syscalls,
)
from tests.certificates import Authority

ROUNDS = 5
AT_ONCE = 64
SHORT, LONG = 64, 256  # tokens of an answer
NUM_ALONE = 60
NUM_FLOOD_TOKENS = 16_384
FLOOD_MS, PACED_MS, SLOW_MS = 1, 20, 50  # steps
TICK_S = 0.01  # of the kernel's clock of CPU

ServerT = TypeVar("ServerT", bound=Server)


@dataclass(frozen=True)
class Target:
    """A row: a server, and how to speak to it."""

    name: str
    server: Server
    connect: Callable[[int], Client]
    """Makes a client with a number of connections."""
    below: str = ""
    """The row that it adds to."""
    connections: tuple[int, ...] = ()
    tls: str = "no"

    @property
    def row(self) -> tuple[str, str]:
        return self.name, self.tls

    @property
    def kept(self) -> list[int]:
        """Numbers of connections that requests share, or take in turns."""
        return [number for number in self.connections if number != NEW_EACH]


@dataclass
class Site:
    """Servers that were started, and the names of those that are not installed."""

    direct: list[Target]
    servers: list[Target]
    missing: list[str]

    @property
    def plain(self) -> list[Target]:
        return [target for target in self.servers if target.tls == "no"]


def grpc_target(name: str, server: Server, ca: Path | None, below: str = "") -> Target:
    def connect(number: int) -> Client:
        return GrpcClient(server.address, number, ca)

    return Target(name, server, connect, below, (1, AT_ONCE, NEW_EACH), "yes" if ca else "no")


def http_target(name: str, server: Server, ca: Path | None, below: str = "") -> Target:
    def connect(number: int) -> Client:
        return HttpClient(server.http_address, ca, number != NEW_EACH, server.ids_path)

    # One connection carries one request at a time.
    return Target(name, server, connect, below, (AT_ONCE, NEW_EACH), "yes" if ca else "no")


@asynccontextmanager
async def started(sglang_python: str | None) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:

        async def start(server: ServerT) -> ServerT:
            stack.push_async_callback(server.stop)
            await server.start()
            return server

        progress("starting the servers")
        authority = Authority(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        workers, http = await start(FreeWorkers()), await start(HttpWorker())
        backend = await start(NullServer())
        links = Target("direct", workers, lambda _: LinkClient(workers.prefill, workers.decode))
        site = Site([links, http_target("direct HTTP", http, None)], [], [])
        if not (has_sglang := SglangRouter.is_installed(sglang_python)):
            site.missing.append("sglang-router")
        for made, ca in ((None, None), (authority.issue("server"), authority.ca)):
            null, proxy = await start(NullServer(made)), await start(Proxy(backend, made))
            router = await start(BatonRouter(workers, made))
            site.servers += [
                grpc_target("null server", null, ca),
                grpc_target("bare proxy", proxy, ca, "null server"),
                grpc_target("router", router, ca, "direct"),
                http_target("router, HTTP", router, ca, "direct"),
            ]
            if has_sglang:
                sglang = await start(SglangRouter(str(sglang_python), http, made))
                site.servers.append(http_target("sglang-router", sglang, ca, "direct HTTP"))
        yield site


# --- what is measured -----------------------------------------------------------------------------


class Samples:
    """Own what was measured: the values of each column in each row."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, ...], list[float]] = defaultdict(list)

    def add(self, row: Sequence[str], column: str, *values: float) -> None:
        self._values[(*row, column)] += values

    def cell(self, row: Sequence[str], column: str, share: float = 0.5, digits: int = 2) -> str:
        values = self._values.get((*row, column))
        return f"{float(np.quantile(values, share)):.{digits}f}" if values else "-"


async def measured(target: Target, connections: int, load: Load) -> tuple[Run, float]:
    """Return what the requests took, and the server's CPU in seconds."""
    client = target.connect(connections)
    try:
        await run(client, Load(load.at_once, load.at_once, 2, FLOOD_MS))  # warms up
        before_s = target.server.cpu_s()
        done = await run(client, load)
        return done, target.server.cpu_s() - before_s
    finally:
        await client.close()


async def alone(site: Site, samples: Samples) -> None:
    """Measure first tokens, one request at a time."""
    for kind in ("text", "ids"):
        medians: dict[tuple[str, str], float] = {}
        for target in (*site.direct, *site.servers):
            progress(f"first tokens of {kind}: {target.name}, TLS {target.tls}")
            done, _ = await measured(target, 1, Load(NUM_ALONE, 1, 4, FLOOD_MS, kind == "ids"))
            ttft_ms = [answer.ttft_s * 1e3 for answer in done.answers]
            median_ms = float(np.median(ttft_ms))
            samples.add(target.row, kind, *ttft_ms)
            medians[target.row] = median_ms
            if target.below:
                plain_ms = medians[target.below, "no"]
                below_ms = medians.get((target.below, target.tls), plain_ms)
                samples.add(target.row, f"{kind} added", median_ms - below_ms)


async def paced(site: Site, samples: Samples) -> None:
    """Measure the CPU of requests whose tokens come at a worker's pace."""
    for target in site.servers:
        for connections in target.kept:
            progress(f"CPU: {target.name}, {connections} connections, TLS {target.tls}")
            row, cpu_s = (*target.row, str(connections)), []
            for num_tokens in (SHORT, LONG):
                load = Load(AT_ONCE, AT_ONCE, num_tokens, PACED_MS)
                done, took_s = await measured(target, connections, load)
                cpu_s.append(took_s / AT_ONCE)
            samples.add(row, "request", cpu_s[0] * 1e3)
            samples.add(row, "further", (cpu_s[1] - cpu_s[0]) / (LONG - SHORT) * 1e6)
            samples.add(row, "messages", done.num_messages / done.num_tokens)


async def flooded(site: Site, samples: Samples) -> None:
    """Measure tokens a second where the workers have more of them than the server can take."""
    for target in site.plain:
        for num_tokens in (SHORT, LONG):
            progress(f"tokens/s: {target.name}, {num_tokens} tokens each")
            num_requests = max(AT_ONCE, NUM_FLOOD_TOKENS // num_tokens)
            load = Load(num_requests, AT_ONCE, num_tokens, FLOOD_MS)
            done, cpu_s = await measured(target, target.connections[0], load)
            row = (target.name, str(num_tokens))
            samples.add(row, "rate", done.num_tokens / done.wall_s)
            samples.add(row, "rate of CPU", done.num_tokens / max(cpu_s, TICK_S))
            samples.add(row, "cores", cpu_s / done.wall_s)
            samples.add(row, "messages", done.num_messages / done.num_tokens)


async def counted(site: Site, samples: Samples) -> None:
    """Count a request's system calls. Raises OSError where strace is missing, or may not attach."""
    for target in site.servers:
        for connections in target.connections:
            name = str(connections or "new")
            progress(f"system calls: {target.name}, {name} connections, TLS {target.tls}")
            client = target.connect(connections)
            try:
                await run(client, Load(AT_ONCE, AT_ONCE, 2, FLOOD_MS))
                async with Syscalls(target.server) as calls:
                    await run(client, Load(AT_ONCE, AT_ONCE, SHORT, SLOW_MS))
            finally:
                await client.close()
            samples.add(target.row, name, calls.number / AT_ONCE)


# --- the report -----------------------------------------------------------------------------------


class Column(NamedTuple):
    title: str
    measured: str
    share: float = 0.5
    digits: int = 2


def first_tokens() -> list[Column]:
    return [
        column
        for kind in ("text", "ids")
        for column in (
            Column(kind, kind),
            Column("p90", kind, 0.9),
            Column("added", f"{kind} added"),
            Column("p90", f"{kind} added", 0.9),
        )
    ]


def cpu() -> list[Column]:
    return [
        Column(f"CPU ms, {SHORT} tokens", "request"),
        Column("p90", "request", 0.9),
        Column("us a further token", "further", 0.5, 0),
        Column("p90", "further", 0.9, 0),
        Column("messages a token", "messages"),
    ]


def rates() -> list[Column]:
    return [
        Column("tokens/s", "rate", 0.5, 0),
        Column("p90", "rate", 0.9, 0),
        Column("tokens a CPU second", "rate of CPU", 0.5, 0),
        Column("cores busy", "cores"),
        Column("messages a token", "messages"),
    ]


def calls() -> list[Column]:
    titles = {"1": "1 connection", str(AT_ONCE): f"{AT_ONCE} connections", "new": "a new one each"}
    return [Column(title, number, 0.5, 0) for number, title in titles.items()]


def tables(site: Site, samples: Samples) -> list[str]:
    def table(names: str, rows: Iterable[Sequence[str]], columns: Sequence[Column]) -> str:
        """`names`: of the cells that name a row."""
        header = [*names.split(" | "), *(column.title for column in columns)]
        lines = [[*row, *(samples.cell(row, *column[1:]) for column in columns)] for row in rows]
        lines += [[name, "not installed", *["-"] * (len(header) - 2)] for name in site.missing]
        return markdown(header, lines)

    every = [target.row for target in (*site.direct, *site.servers)]
    connected = [(*each.row, str(number)) for each in site.servers for number in each.kept]
    lengths = [(each.name, str(length)) for each in site.plain for length in (SHORT, LONG)]
    servers = [target.row for target in site.servers]
    title = f"{AT_ONCE} at once"
    return [
        table("TTFT ms, one at a time | TLS", every, first_tokens()),
        table(f"{title}, {PACED_MS} ms a step | TLS | connections", connected, cpu()),
        table(f"{title}, as fast as it can | tokens each", lengths, rates()),
        table(f"system calls a request of {SHORT} tokens | TLS", servers, calls()),
    ]


async def report(rounds: int = ROUNDS, sglang_python: str | None = None) -> str:
    samples, skipped = Samples(), ""
    async with started(sglang_python) as site:
        for number in range(1, rounds + 1):
            progress(f"round {number} of {rounds}")
            for measure in (alone, paced, flooded):
                await measure(site, samples)
        try:
            await counted(site, samples)
        except OSError as error:
            skipped = f"\n\nSystem calls were not counted: {error}."
    return "\n\n".join(tables(site, samples)) + skipped


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.router")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--sglang-python", metavar="PATH", help="a Python with sglang-router")
    options = parser.parse_args()
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # it warns of each process that is started
    head = describe(f"python -m bench.router --rounds {options.rounds}")
    printed = uvloop.run(report(options.rounds, options.sglang_python))
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"{head}\n- load average after it: {load}\n\n{__doc__}\n{printed}")


if __name__ == "__main__":
    main()
