"""The weights digest: no bit may differ unseen, however the work and the files are divided."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine import weights
from engine.errors import CheckpointError
from engine.weights import INDEX_FILE, SINGLE_FILE, Checkpoint, weights_digest

TENSORS = {
    "embedding": torch.randn(301, 33, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "matrix": torch.randn(64, 70, generator=torch.Generator().manual_seed(2)),
    "experts": torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(3)).half(),
    "bias": torch.randn(5, generator=torch.Generator().manual_seed(4)),
    "scalar": torch.tensor(2.5),
    "nothing": torch.zeros(0, 4),
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_CHUNK_BYTES", 1000)


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / SINGLE_FILE)
    return folder


def digest_of(folder: Path) -> str:
    with Checkpoint(folder) as checkpoint:
        return weights_digest(checkpoint, num_threads=1)


def data_start(path: Path) -> int:
    """Where the tensors begin: behind the header and its length."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_one_changed_bit_of_any_element_changes_the_digest(tmp_path: Path) -> None:
    path = save(tmp_path, TENSORS) / SINGLE_FILE
    content = path.read_bytes()
    start = data_start(path)
    assert len(content) - start == sum(tensor.nbytes for tensor in TENSORS.values())
    seen = {digest_of(tmp_path)}
    changed = range(start, len(content), 397)
    for position in (*changed, len(content) - 1):
        path.write_bytes(
            content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        )
        seen.add(digest_of(tmp_path))
    assert len(seen) == 2 + len(changed)


def test_equal_bytes_under_other_names_types_or_shapes_have_other_digests(tmp_path: Path) -> None:
    matrix = TENSORS["matrix"]
    variants = [
        {"a": matrix, "b": matrix + 1},
        {"a": matrix + 1, "b": matrix},
        {"a": matrix, "c": matrix + 1},
        {"a": matrix.view(torch.int32), "b": matrix + 1},
        {"a": matrix.view(70, 64), "b": matrix + 1},
        {"ab": torch.cat((matrix, matrix + 1))},
    ]
    assert len({digest_of(save(tmp_path, variant)) for variant in variants}) == len(variants)


def test_files_it_is_spread_over_leave_no_trace(tmp_path: Path) -> None:
    whole = digest_of(save(tmp_path / "one", TENSORS))
    many = tmp_path / "many"
    many.mkdir()
    index = {}
    for number, (name, tensor) in enumerate(reversed(TENSORS.items())):
        file = f"model-{number % 3}.safetensors"
        index[name] = file
        before = {n: TENSORS[n] for n, f in index.items() if f == file}
        save_file(before | {name: tensor}, many / file)
    (many / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    assert digest_of(many) == whole


class RanksInThreads:
    """The ranks of a group, each a thread of this process."""

    def __init__(
        self, rank: int, size: int, parts: list[torch.Tensor], all_here: threading.Barrier
    ):
        self.rank, self.size, self._parts, self._all_here = rank, size, parts, all_here

    def sum_on_host(self, x: torch.Tensor) -> torch.Tensor:
        self._parts.append(x.clone())
        self._all_here.wait(timeout=30)
        return x.copy_(torch.stack(self._parts).sum(0))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_that_share_the_work_find_what_one_finds_alone(tmp_path: Path, size: int) -> None:
    folder = save(tmp_path, TENSORS)
    parts: list[torch.Tensor] = []
    all_here = threading.Barrier(size)

    def of_rank(rank: int) -> str:
        with Checkpoint(folder) as checkpoint:
            return weights_digest(checkpoint, 2, RanksInThreads(rank, size, parts, all_here))

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(of_rank, range(size)))
    assert found == [digest_of(folder)] * size
    hashed = sorted(int(part.any(dim=1).sum()) for part in parts)
    assert sum(hashed) == len(parts[0])  # each chunk by one rank
    assert hashed[-1] - hashed[0] <= 3


def test_a_type_that_safetensors_cannot_read_is_named_with_its_file(tmp_path: Path) -> None:
    entry = {"dtype": "F6_E2M3", "shape": [16], "data_offsets": [0, 12]}
    header = json.dumps({"weight": entry}).encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE}: tensor weight: .*F6_E2M3"):
        digest_of(tmp_path)
