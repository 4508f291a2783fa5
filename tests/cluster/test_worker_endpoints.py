"""What a worker serves and registers: port, metrics, the model's text files, its capacity."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.config.engine import FakeEngineConfig
from baton.config.workers import WorkerSettings
from baton.fleet import Role
from baton.link.frames import LinkError, Method
from baton.model_folder import TEXT_FILES
from baton.v1 import common_pb2, router_pb2, worker_pb2
from cluster.worker.process import RankActor
from cluster.worker.rank import free_port
from engine.api import Engine
from engine.wire import read_spec
from tests.link_stub import LinkStub, books_at
from tests.router.deployment import byte_files
from tests.router.real_workers import Listed, router_over


async def test_a_worker_listens_at_the_port_of_its_settings_and_so_does_the_next_at_once(
    kit: Any,
) -> None:
    port = free_port("127.0.0.1")
    settings = WorkerSettings(heartbeat_s=0.05, port=port, metrics_port=None)
    for _ in range(2):
        async with kit.running_worker("decode-0", Role.DECODE, settings=settings) as worker:
            assert worker.address == f"127.0.0.1:{port}"
            assert not (await books_at(worker.address)).problems


async def test_probes_learn_whether_it_serves_and_nothing_else(kit: Any) -> None:
    settings = WorkerSettings(heartbeat_s=0.05, metrics_port=None, health_port=0)

    def probe(path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://{worker.health_address}{path}") as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    async with kit.running_worker("decode-0", Role.DECODE, settings=settings) as worker:
        assert await asyncio.to_thread(probe, "/live") == (200, b"")
        for path in ("/", "/metrics", "/live/", "/live?verbose"):
            assert await asyncio.to_thread(probe, path) == (404, b"")
        reader, writer = await asyncio.open_connection(*worker.health_address.split(":"))
        writer.write(b"GET /live HTTP/1.1\r\n" + b"a: b\r\n" * 1000)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        link = await kit.decode_link(worker.address, "router-a").open()
        spec = kit.make_spec("last", 60)
        spec.sampling.max_tokens = 500
        await link.reserve(spec)
        await link.until(lambda: link.of("last").tokens)
        worker.drain()
        assert await asyncio.to_thread(probe, "/live") == (503, b"")
        await link.close()


WITH_METRICS = WorkerSettings(heartbeat_s=0.05)


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        return str(answer.read(), "utf-8")


async def test_metrics_are_served_with_the_workers_labels(kit: Any) -> None:
    async with kit.running_worker("decode-7", Role.DECODE, settings=WITH_METRICS) as worker:
        text = await asyncio.to_thread(scrape, worker.metrics_address)
    assert 'baton_worker_num_orphans{pool="decode",worker="decode-7"} 0.0' in text
    for name, cause in (("worker_steps", ""), ("wasted_tokens", 'cause="preemption",')):
        assert f'baton_{name}_total{{{cause}pool="decode",worker="decode-7"}} ' in text


async def test_quarantined_memory_is_a_metric_in_bytes(kit: Any) -> None:
    async with kit.running_worker("decode-7", Role.DECODE, settings=WITH_METRICS) as worker:

        async def tell(num_bytes: int) -> None:
            line = f'baton_kv_quarantined_bytes{{pool="decode",worker="decode-7"}} {num_bytes}.0'
            async with asyncio.timeout(10):
                while line not in await asyncio.to_thread(scrape, worker.metrics_address):
                    await worker._load_now()

        async def ask(command: Callable[[Engine], Any]) -> Any:
            return await asyncio.wrap_future(worker.engine.call(command))

        spec = read_spec(kit.make_spec("held", 100))
        await ask(lambda engine: engine.reserve(spec))
        layout = worker.rank.model.layout
        counts = 13, 4  # all of the prompt; its last window
        num_bytes = sum(n * layout.rank_block_bytes(g, 0, 1) for g, n in enumerate(counts))
        await tell(0)
        await ask(lambda engine: engine.abort(spec.request_id))
        await tell(num_bytes)
        await ask(lambda engine: engine.release(spec.request_id))
        await tell(0)


async def pieces(address: str) -> list[worker_pb2.ReadTokenizerResponse]:
    stub = LinkStub(address)
    try:
        request = worker_pb2.ReadTokenizerRequest()
        return [piece async for piece in await stub._begun(Method.READ_TOKENIZER, request)]
    finally:
        await stub.close()


def written(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    for name, data in {**byte_files(), **files}.items():
        (folder / name).write_bytes(data)
    return folder


async def test_files_come_whole_in_pieces_and_nothing_else_of_the_folder_does(
    tmp_path: Path, kit: Any
) -> None:
    large = bytes(range(256)) * 10_000
    files = {"tokenizer.json": large, "model.safetensors": b"weights"}
    folder = written(tmp_path / "model", **files)
    async with kit.running_worker("d", Role.DECODE, model=str(folder)) as worker:
        reported = await pieces(worker.address)
    assert max(len(piece.data) for piece in reported) == 1 << 20
    found: dict[str, bytes] = {}
    for piece in reported:
        found[piece.name] = found.get(piece.name, b"") + piece.data
    assert found == {**byte_files(), "tokenizer.json": large}
    assert found.keys() <= set(TEXT_FILES)


async def test_a_tokenizer_of_its_own_comes_beside_the_model_s_configuration(
    tmp_path: Path, kit: Any
) -> None:
    model = written(tmp_path / "model", **{"config.json": b"{}"})
    text = written(tmp_path / "text", **{"tokenizer.json": b"its own"})
    names = {"model": str(model), "tokenizer": str(text)}
    async with kit.running_worker("d", Role.DECODE, **names) as worker:
        reported = {piece.name: piece.data for piece in await pieces(worker.address)}
    assert (reported["tokenizer.json"], reported["config.json"]) == (b"its own", b"{}")


async def test_a_worker_without_a_tokenizer_says_so(kit: Any, tmp_path: Path) -> None:
    async with kit.running_worker("d", Role.DECODE, model=str(tmp_path)) as worker:
        with pytest.raises(LinkError, match=r"tokenizer\.json: missing") as refused:
            await pieces(worker.address)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_request_without_max_tokens_runs_where_memory_holds_less_than_the_context(
    kit: Any,
) -> None:
    small = dataclasses.replace(
        kit.engine, num_blocks=20, fake=FakeEngineConfig(vocab_size=257, max_model_len=4096)
    )
    longest = 19 * 8 + 1
    async with (
        kit.running_worker("p0", Role.PREFILL, small) as prefill,
        kit.running_worker("d0", Role.DECODE, small) as decode,
    ):
        listed = [Listed(worker, worker.address) for worker in (prefill, decode)]
        async with router_over(*listed) as (router, client):
            request = router_pb2.GenerateRequest(
                token_ids=router_pb2.TokenIds(ids=range(20)),
                sampling=common_pb2.SamplingParams(temperature=0.0, ignore_eos=True),
                seed=7,
            )
            answers = await asyncio.gather(*(client.ask(request) for _ in range(2)))
            assert router.fleet.num_bookings == 0
        for answer in answers:
            assert len(answer.ids) == longest - 20
        assert answers[0].ids == answers[1].ids
        await kit.nothing_held(prefill, decode)
        info = decode.info()
        assert (info.num_blocks, info.max_model_len, info.max_request_tokens) == (19, longest, 152)
        assert info.max_held_tokens_per_request == 0


def test_nobody_else_can_take_the_port_at_which_the_ranks_of_a_replica_meet() -> None:
    """A second replica that starts just now would meet at the same one, and mix ranks up."""
    actor = RankActor()
    port = actor.listen("127.0.0.1")
    try:
        with pytest.raises(OSError, match="in use"), socket.create_server(("127.0.0.1", port)):
            pass
    finally:
        # Without a launch nothing else closes the socket.
        assert actor._meeting is not None
        actor._meeting.close()
