"""`python -m router` as a process: it serves, drains at SIGTERM, and may be killed."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client import AsyncClient
from baton.config.cluster import ClusterConfig
from baton.config.router import RouterConfig
from baton.config.settings import changed
from cluster.worker.rank import free_port
from router.__main__ import operator_port, serve
from router.door.server import RouterServer
from router.fleet.fleet_links import FleetLinks, FleetReport
from tests.router.answers import PROMPT, Client, ask_for, assert_whole
from tests.router.callers import DOORS, LostError, caller_at
from tests.router.deployment import byte_model, deployment
from tests.router.proxy import Proxy
from tests.router.scripted_tokens import oracle
from tests.router.scripted_worker import MODEL


@asynccontextmanager
async def router_process(
    control: str,
    folder: Path,
    log_level: str = "warning",
    log: IO[str] | None = None,
    http_port: int | None = None,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Client]]:
    """`log`: where its log goes; None: where this process's goes."""
    config = folder / "cluster.yaml"
    config.write_text(
        f"model: {folder}\nserved_model_name: {MODEL}\nlog_level: {log_level}\n"
        "router:\n  placement: {local_prefill: never}\n"
        f"  http: {{port: {json.dumps(http_port)}}}\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--control", control, "--config", str(config)),
        *("--listen", "127.0.0.1:0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith("router listening on "), line
        client = Client(line.split()[-1])
        yield process, client
        await client.channel.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


NUM_TOKENS = 120  # a stream is still under way when the last one has begun


@pytest.mark.parametrize("door", DOORS)
async def test_a_killed_router_s_streams_go_on_at_another_without_a_step_repeated(
    tmp_path: Path, door: str
) -> None:
    model, port = byte_model(tmp_path), free_port("127.0.0.1")
    async with deployment(1, 2, clients={"resume_window_s": 20.0}, http={"port": 0}) as d:
        for worker in ("d0", "d1"):
            d.worker(worker).step_s = 0.02
        asked = [ask_for(f"{PROMPT} {n}", NUM_TOKENS, request_id=f"r{n}") for n in range(8)]
        for request in asked[1::2]:
            request.ClearField("seed")
        seen: list[Any] = [None] * len(asked)
        reached = [asyncio.Event() for _ in asked]
        async with router_process(d.registry.address, tmp_path, http_port=port) as (process, made):
            killed = caller_at(door, made.address, f"127.0.0.1:{port}")

            async def first_part(number: int) -> None:
                def note(answer: Any) -> bool:
                    seen[number] = answer
                    if answer.num_tokens >= 3:
                        reached[number].set()
                    return False

                with pytest.raises(LostError):
                    await killed.ask(asked[number], note)

            async with asyncio.TaskGroup() as group:
                for number in range(len(asked)):
                    group.create_task(first_part(number))
                await asyncio.gather(*(event.wait() for event in reached))
                process.kill()
            await killed.close()
        other = caller_at(door, d.servers[0].address, d.servers[0].http_address)
        answers = [await other.come_again(*each) for each in zip(asked, seen)]
        await other.close()
        workers = [d.worker("d0"), d.worker("d1")]
        ran = {run.spec.request_id: run.spec for w in workers for run in w.finished.values()}
        for request, answer in zip(asked, answers):
            prompt, seed = list(request.text.encode()), ran[request.request_id].seed
            answer.assert_says(model, oracle(prompt, seed, NUM_TOKENS))
            assert not request.HasField("seed") or seed == request.seed
        # The first token is the prefill worker's.
        assert sum(worker.num_decode_steps for worker in workers) == (NUM_TOKENS - 1) * len(asked)


async def test_sigterm_drains_and_ends_the_process(tmp_path: Path) -> None:
    byte_model(tmp_path)
    async with (
        deployment() as d,
        router_process(d.registry.address, tmp_path) as (process, client),
    ):
        d.worker("d0").may_decode.clear()
        asking = asyncio.create_task(client.ask(ask_for(PROMPT)))
        await d.until(lambda: bool(d.worker("d0").runs))
        process.send_signal(signal.SIGTERM)
        d.worker("d0").may_decode.set()
        assert_whole(await asking, PROMPT)
        assert await process.wait() == 0


async def test_a_request_s_line_is_in_the_log_unless_the_cluster_s_level_leaves_it_out(
    tmp_path: Path,
) -> None:
    byte_model(tmp_path)
    async with deployment() as d:
        for level, num_lines in (("info", 1), ("warning", 0)):
            with (tmp_path / level).open("w+") as log:
                async with router_process(d.registry.address, tmp_path, level, log) as (_, client):
                    assert_whole(await client.ask(ask_for(PROMPT)), PROMPT)
                log.seek(0)
                assert log.read().count('"outcome": "length"') == num_lines


async def test_a_fault_in_what_follows_the_fleet_ends_the_process_and_not_the_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_model(tmp_path)
    failing: list[FleetLinks] = []
    update = FleetLinks.update

    def fail_when_failing(links: FleetLinks, report: FleetReport) -> None:
        if links in failing:
            raise AssertionError("a fault of ours")
        update(links, report)

    monkeypatch.setattr(FleetLinks, "update", fail_when_failing)
    servers: list[RouterServer] = []
    start = RouterServer.start

    async def keep(server: RouterServer) -> None:
        servers.append(server)
        await start(server)

    monkeypatch.setattr(RouterServer, "start", keep)
    async with deployment() as d:
        d.worker("d0").may_decode.clear()
        routing = changed(RouterConfig(), http={"port": None}, placement={"local_prefill": "never"})
        config = ClusterConfig(str(tmp_path), served_model_name=MODEL, router=routing)
        serving = asyncio.create_task(serve(config, d.registry.address, "127.0.0.1:0"))
        await d.until(lambda: len(servers) == 2)
        router, client = await servers[1].units.main_router(), Client(servers[1].address)
        await d.connected(2, router)
        asking = asyncio.create_task(client.ask(ask_for(PROMPT)))
        await d.until(lambda: bool(d.worker("d0").runs))
        failing.append(router.links)
        await d.registry.publish()
        await asyncio.wait_for(servers[1].units.fault, 10)
        d.worker("d0").may_decode.set()
        assert_whole(await asking, PROMPT)
        assert await asyncio.wait_for(serving, 20) == 1
        await client.channel.close()


async def test_a_router_finds_registry_and_workers_past_the_environment_s_http_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with deployment() as d, AsyncClient(d.servers[0].address) as client:
        assert [model.name for model in await client.models()] == [MODEL]


async def test_a_second_sigterm_leaves_every_request_to_its_worker_for_another_router(
    tmp_path: Path,
) -> None:
    byte_model(tmp_path)
    async with deployment() as d:
        worker = d.worker("d0")
        worker.on_token = lambda running: (
            worker.may_decode.clear() if len(running.output) >= 3 else None
        )
        prompts = [f"{PROMPT} {number}" for number in range(4)]
        asked = [ask_for(p, 20, request_id=f"r{n}") for n, p in enumerate(prompts)]
        async with router_process(d.registry.address, tmp_path) as (process, client):
            asking = [asyncio.create_task(client.ask(request)) for request in asked]
            await d.until(lambda: len(worker.runs) == 4 and not worker.may_decode.is_set())
            process.send_signal(signal.SIGTERM)
            health = health_pb2_grpc.HealthStub(client.channel)
            await until_not_serving(health)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 10) == 0
            ends = await asyncio.gather(*asking, return_exceptions=True)
            assert all(isinstance(end, grpc.aio.AioRpcError) for end in ends)
        await d.until(lambda: len(worker.sessions) == 1)  # only the other router's
        assert not worker.cancels
        assert len(worker.runs) == 4
        worker.on_token = lambda running: None
        worker.may_decode.set()
        for request, prompt in zip(asked, prompts):
            request.resume_from_index = 0
            assert_whole(await d.client.ask(request), prompt, 20)
        assert worker.num_reserves == 4
        assert worker.num_decode_steps == 4 * 19


async def until_not_serving(health: health_pb2_grpc.HealthStub) -> None:
    async with asyncio.timeout(10):
        async for answer in health.Watch(health_pb2.HealthCheckRequest()):
            if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                return


async def test_a_client_that_cancels_while_the_router_drains_ends_its_request_at_once() -> None:
    async with deployment() as d:
        d.worker("d0").may_decode.clear()
        call = d.client.stub.Generate(ask_for(PROMPT))
        await d.until(lambda: bool(d.worker("d0").runs))
        closing = asyncio.create_task(d.router.close(30.0))
        call.cancel()
        await asyncio.wait_for(closing, 5)
        await d.until(lambda: not d.worker("d0").runs)
        assert len(d.worker("d0").cancels) == 1


async def test_a_host_that_goes_silent_is_noticed_by_its_unanswered_pings() -> None:
    async with deployment(1, 1) as d:
        hung = await d.add_worker("d9", d.worker("d0").role)
        proxy = await Proxy.to(hung.address)
        d.registry.workers = [w for w in d.registry.workers if w.worker_id != "d9"]
        await d.registry.publish()
        hung.incarnation = hung.kv.incarnation = 2
        hung._port.links.name = "d9/2"  # type: ignore[union-attr]
        hung.address = proxy.address
        d.registry.workers.append(hung)
        await d.registry.publish()
        await d.until(lambda: d.router.links.find("d9", 2) is not None)
        d.worker("d0").may_decode.clear()
        hung.may_decode.clear()
        asking = [asyncio.create_task(d.client.ask(ask_for(f"{PROMPT} {n}"))) for n in range(6)]
        await d.until(lambda: len(hung.runs) + len(d.worker("d0").runs) == 6)
        assert hung.runs
        proxy.freeze()
        await d.until(lambda: d.router.links.find("d9", 2) is None)
        d.worker("d0").may_decode.set()
        for number, answer in enumerate(await asyncio.gather(*asking)):
            assert_whole(answer, f"{PROMPT} {number}")
        await hung.die()
        await d.check_empty()
        await proxy.close()


async def refused_start(folder: Path, settings: str = "", **arguments: str) -> str:
    """The one line that a router says which cannot start so."""
    config = folder / "cluster.yaml"
    config.write_text(f"model: {folder}\n{settings}")
    given = {"control": "127.0.0.1:1", "config": str(config), "listen": "127.0.0.1:0", **arguments}
    flags = [word for name, value in given.items() for word in (f"--{name}", value)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said, errors = await asyncio.wait_for(process.communicate(), 30)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 2, errors
    assert not said
    (line,) = errors.decode().splitlines()
    return line


async def test_a_config_with_a_wrong_key_is_refused_by_name(tmp_path: Path) -> None:
    assert "max_queue" in await refused_start(tmp_path, "router:\n  admission: {max_queu: 5}\n")


async def test_a_router_without_its_identity_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys" / "router" / "role.key"
    said = await refused_start(tmp_path, "internal: {folder: keys}\n")
    assert said == f"router: internal.folder: {file} cannot be read: No such file or directory"


async def test_a_router_that_cannot_listen_says_so_in_one_line(tmp_path: Path) -> None:
    byte_model(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        in_use = f"router: cannot listen on {address}: Address already in use"
        assert await refused_start(tmp_path, listen=address) == in_use
        metrics = f"router:\n  metrics: {{port: {taken.getsockname()[1]}}}\n"
        assert await refused_start(tmp_path, metrics) == in_use
        assert await refused_start(tmp_path, metrics.replace("metrics", "http")) == in_use
    assert "'nowhere' is no address" in await refused_start(tmp_path, control="nowhere")


@pytest.mark.parametrize(
    ("listens", "asked"), [("0.0.0.0", "127.0.0.1"), ("0.0.0.0", "[::1]"), ("[::1]", "[::1]")]
)
async def test_metrics_are_served_at_the_addresses_of_their_own_host(
    listens: str, asked: str
) -> None:
    if asked == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    config = changed(RouterConfig(), metrics={"host": listens, "port": 0})
    async with deployment() as d:
        server = operator_port(config, d.servers[0].units)
        assert server is not None
        await server.start()
        assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)
        url = f"http://{asked}:{server.port}"
        assert b"baton_requests" in await asyncio.to_thread(read, f"{url}/metrics")
        page = await asyncio.to_thread(read, url)
        assert b"EventSource" in page
        rebound = urllib.request.Request(url, headers={"host": "evil.test"})
        if listens == "0.0.0.0":
            assert await asyncio.to_thread(read, rebound)
        else:  # only a web page of a developer's own browser calls the loopback by another name
            with pytest.raises(urllib.error.HTTPError, match="421"):
                await asyncio.to_thread(read, rebound)
        assert b"http://" not in page.replace(b"http://www.w3.org/2000/svg", b"")  # it is offline
        news = json.loads(
            (await asyncio.to_thread(read, f"{url}/events", 1)).removeprefix(b"data: ")
        )
        (unit,) = news["units"]
        assert [worker["id"] for worker in unit["workers"]] == ["p0", "d0"]
        (request,) = unit["requests"]
        assert (request["outcome"], request["decode_worker"]) == ("length", "d0")
        assert "prefill on p0" in request["reason"]
        assert unit["flows"][0]["bytes_per_s"] > 0
        assert sum(count for _, count in news["ttft"]) == 1
        await server.stop()


def read(url: str | urllib.request.Request, num_lines: int | None = None) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return bytes(answer.read() if num_lines is None else answer.readline())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timeouts": {"token_s": -1.0}}, "token_s"),
        ({"links": {"reconnect_min_s": 0.0}}, "reconnect_min_s must be above 0, not 0.0"),
        ({"links": {"reconnect_max_s": 0.0}}, "reconnect_max_s must be above 0, not 0.0"),
        ({"links": {"connect_timeout_s": 0.0}}, "connect_timeout_s must be above 0, not 0.0"),
        ({"links": {"keepalive_s": 0.0}}, "keepalive_s must be above 0, not 0.0"),
        ({"links": {"registry_silence_s": 0.0}}, "registry_silence_s must be above 0, not 0.0"),
        (
            {"links": {"reconnect_min_s": 0.5, "reconnect_max_s": 0.4}},
            "reconnect_min_s must be at most reconnect_max_s (0.4), not 0.5",
        ),
    ],
)
def test_unknown_modes_and_times_that_would_make_the_router_spin_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        changed(RouterConfig(), **changes)
