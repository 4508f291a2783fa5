"""A worker tells the text files of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.model_folder import TEXT_FILES
from baton.v1 import worker_pb2, worker_pb2_grpc
from cluster.pools.role_plan import Role
from tests.router.deployment import byte_files


async def pieces(address: str) -> list[worker_pb2.ReadTokenizerResponse]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return [piece async for piece in stub.ReadTokenizer(worker_pb2.ReadTokenizerRequest())]


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
    async with kit.running_worker("d", Role.DECODE, model_path=str(folder)) as worker:
        told = await pieces(worker.address)
    assert max(len(piece.data) for piece in told) == 1 << 20
    found: dict[str, bytes] = {}
    for piece in told:
        found[piece.name] = found.get(piece.name, b"") + piece.data
    assert found == {**byte_files(), "tokenizer.json": large}
    assert found.keys() <= set(TEXT_FILES)


async def test_a_tokenizer_of_its_own_comes_beside_the_model_s_configuration(
    tmp_path: Path, kit: Any
) -> None:
    model = written(tmp_path / "model", **{"config.json": b"{}"})
    text = written(tmp_path / "text", **{"tokenizer.json": b"its own"})
    names = {"model_path": str(model), "tokenizer": str(text)}
    async with kit.running_worker("d", Role.DECODE, **names) as worker:
        told = {piece.name: piece.data for piece in await pieces(worker.address)}
    assert (told["tokenizer.json"], told["config.json"]) == (b"its own", b"{}")


async def test_a_worker_without_a_tokenizer_says_so(kit: Any, tmp_path: Path) -> None:
    async with kit.running_worker("d", Role.DECODE, model_path=str(tmp_path)) as worker:
        with pytest.raises(grpc.aio.AioRpcError, match=r"tokenizer\.json: missing") as refused:
            await pieces(worker.address)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
