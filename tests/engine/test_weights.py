"""Model folders as transformers writes them, and what is said of broken ones."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from baton.config.engine import EngineConfig
from engine.errors import CheckpointError, UnsupportedModelError
from engine.models.checkpoint import weights
from engine.models.checkpoint.folder import resolve
from engine.models.checkpoint.weights import INDEX_FILE, SINGLE_FILE, Checkpoint, weights_digest
from engine.run.build import load_model_spec
from tests.engine import checkpoints
from tests.engine.driving import Driver, generate, set_up

CONFIG = EngineConfig(dtype="float32", num_blocks=40, num_threads=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    transformers.logging.disable_progress_bar()
    checkpoints.save("qwen2", tmp_path)
    return tmp_path


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def test_sharded_folder_gives_the_same_tokens_and_fingerprint(tmp_path: Path) -> None:
    transformers.logging.disable_progress_bar()
    one, many = tmp_path / "one", tmp_path / "many"
    checkpoints.save("qwen3-moe", one)
    checkpoints.oracle_model("qwen3-moe").save_pretrained(many, max_shard_size="100KB")
    assert (many / INDEX_FILE).exists()
    found = [
        (setup.spec.kv_fingerprint, generate(Driver(setup), [[1, 2, 3]], 6, 64))
        for setup in (set_up(one, CONFIG), set_up(many, CONFIG))
    ]
    assert found[0] == found[1]


def test_fingerprints_differ_for_other_weights_and_rope_and_one_for_dtype_and_block_size(
    folder: Path,
) -> None:
    """Workers of unlike dtype or block size can continue each other's streams."""

    def fingerprints(**changes: Any) -> tuple[bytes, bytes]:
        config = EngineConfig(**{"dtype": "bfloat16", **changes})
        spec = load_model_spec(str(folder), config)
        return spec.kv_fingerprint, spec.model_fingerprint

    seen = [fingerprints(), fingerprints(dtype="float32"), fingerprints(block_size=32)]
    change_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    seen.append(fingerprints())
    change_tensors(folder, lambda tensors: tensors["model.norm.weight"].add_(1))
    seen.append(fingerprints())
    assert [len(set(column)) for column in zip(*seen)] == [5, 3]


def test_a_part_of_a_tensor_is_that_part(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    whole = load_file(folder / SINGLE_FILE)[name]
    with Checkpoint(folder) as checkpoint:
        part = checkpoint.read(name, tuple(whole.shape), slice(None), slice(48, 96))
        assert torch.equal(part, whole[:, 48:96])


def load(folder: Path) -> None:
    set_up(folder, CONFIG)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"),
            r"1\.self_attn\.k_proj\.bias is miss",
        ),
        (lambda t: t.update({"model.extra": torch.zeros(2)}), r"model\.extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(129)}),
            r"model\.norm\.weight has shape \[129\].*\[128\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(128, dtype=torch.int8)}),
            r"model\.norm\.weight has dtype torch\.int8",
        ),
        (
            lambda t: t["model.norm.weight"][7:8].fill_(math.nan),
            r"model\.safetensors: tensor model\.norm\.weight has values that are not finite",
        ),
        (
            lambda t: t["model.layers.1.mlp.down_proj.weight"][5, 5:6].fill_(-math.inf),
            r"1\.mlp\.down_proj\.weight has values that are not finite",
        ),
    ],
    ids=["missing", "extra", "misshapen", "of integers", "NaN", "infinite"],
)
def test_a_wrong_tensor_is_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], named: str
) -> None:
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=named):
        load(folder)


def test_a_weight_too_large_for_the_dtype_in_use_is_named(folder: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    change_tensors(folder, lambda tensors: tensors[name][5, 5:6].fill_(1e5))
    load(folder)
    with pytest.raises(CheckpointError, match=rf"{name} has values .* not finite in torch.float16"):
        set_up(folder, dataclasses.replace(CONFIG, dtype="float16"))


@pytest.mark.parametrize("keep", [0, 5, 2000, -100])
def test_truncated_file_is_named(folder: Path, keep: int) -> None:
    path = folder / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=SINGLE_FILE):
        load(folder)


def test_missing_files_are_named(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"{SINGLE_FILE} is missing"):
        load(folder)
    (folder / INDEX_FILE).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors is missing"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load(folder)


def test_tensor_that_the_index_promises_is_missed_by_name(folder: Path) -> None:
    (folder / SINGLE_FILE).rename(folder / "model-1.safetensors")
    index = {"weight_map": {"model.nowhere.weight": "model-1.safetensors"}}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.nowhere\.weight is missing"):
        load(folder)


@pytest.mark.parametrize("wrong", [["model-1.safetensors"], None, 7])
def test_an_index_that_names_no_file_for_a_tensor_is_refused_by_both_names(
    folder: Path, wrong: object
) -> None:
    (folder / SINGLE_FILE).rename(folder / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "model.norm.weight": wrong}}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{INDEX_FILE}: tensor model\.norm\.weight"):
        load(folder)


def test_a_single_file_is_the_model_whatever_an_index_beside_it_says(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = load_model_spec(str(folder), CONFIG)
    stale = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / INDEX_FILE).write_text(json.dumps(stale))
    assert load_model_spec(str(folder), CONFIG) == whole
    assert f"{INDEX_FILE} is not" in caplog.text


@pytest.mark.parametrize("broken", ['{"architectures": [', "[" * 100_000, "1" * 5000, '"\\ud800"'])
def test_broken_json_is_named(folder: Path, broken: str) -> None:
    (folder / "config.json").write_text(broken)
    with pytest.raises(CheckpointError, match=r"config\.json is not readable JSON"):
        load(folder)


@pytest.mark.parametrize("name", ["../secret", "x" * 5000, "a\0b", ".", "link"])
def test_an_index_names_files_of_its_folder_alone(folder: Path, name: str) -> None:
    (folder.parent / "secret").write_bytes((folder / SINGLE_FILE).read_bytes())
    (folder / "link").symlink_to("../secret")
    (folder / SINGLE_FILE).unlink()
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"leads out|cannot be read|is missing"):
        load(folder)


_TENSOR = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


_HEADERS = ["", "[]", "null", "1", "NaN", "[" * 100_000, '{"a": ' * 100_000, '{"a": 1}']
_HEADERS += ['{"\\ud800": 1}', '{"__metadata__": 1}']
_WRONG = [{"dtype": 1}, {"shape": [-1]}, {"shape": "x"}, {"shape": [2**32, 2**32]}]


@pytest.mark.parametrize("header", _HEADERS + [json.dumps({"a": _TENSOR | w}) for w in _WRONG])
def test_a_header_that_is_none_is_refused_with_its_file(tmp_path: Path, header: str) -> None:
    data = header.encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(data).to_bytes(8, "little") + data + bytes(16))
    with pytest.raises(CheckpointError, match=SINGLE_FILE):
        digest_of(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        ({"architectures": None}, r"\(none\) is not supported"),
        ({"hidden_size": None}, "hidden_size: .* not null"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": {"type": "yarn", "factor": 4.0},
            },
            "rope_parameters: rope_scaling says otherwise",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "each kind of layer"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": "gptq"}, r"quantization_config: .*\(gptq\)"),
        ({"num_key_value_heads": 3}, "no multiple of 3"),
        ({"architectures": "Qwen2ForCausalLM"}, "architectures: a list of str"),
        ({"architectures": [[]]}, "architectures: a list of str"),
        ({"hidden_size": "64"}, "hidden_size: .* not '64'"),
        ({"vocab_size": 1.5}, "vocab_size: .* not 1.5"),
        ({"intermediate_size": True}, "intermediate_size: .* not True"),
        ({"num_attention_heads": 0}, "num_attention_heads: .* not 0"),
        ({"num_attention_heads": 1000}, "head_dim: an even number .* not 0"),
        ({"num_key_value_heads": [4]}, "num_key_value_heads: .* not \\[4\\]"),
        ({"head_dim": 15}, "head_dim: an even number .* not 15"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: .* not -1"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: .* not 1000000000000"),
        ({"max_position_embeddings": None}, "max_position_embeddings: .* not null"),
        ({"rms_norm_eps": None}, "rms_norm_eps: .* not null"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: a finite number .* not nan"),
        ({"rope_parameters": None, "rope_theta": "x"}, "rope_theta: .* not 'x'"),
        ({"rope_parameters": None, "rope_theta": 10**400}, "rope_theta: a finite number"),
        ({"rope_parameters": [1]}, "rope_parameters: a JSON object"),
        ({"rope_parameters": {"rope_type": [1]}}, r"rope_parameters.rope_type: rope type \[1\]"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta: .* not 0"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": -2}},
            "rope_parameters.factor: .* not -2",
        ),
        ({"layer_types": 3}, "layer_types: a list of str"),
        ({"layer_types": ["full_attention"]}, "layer_types: .* for 3 layers"),
        ({"use_sliding_window": "no"}, "use_sliding_window: true or false"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window: .* not 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: true or false"),
    ],
)
def test_unsupported_settings_are_named(folder: Path, changes: dict[str, Any], named: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=named) as refused:
        load(folder)
    assert str(folder / "config.json") in str(refused.value)


@pytest.mark.parametrize("wrong", ["</s>", [1, "2"], {"a": 1}, -1])
def test_ends_of_sequence_that_are_no_token_ids_are_named(folder: Path, wrong: object) -> None:
    change_config(folder, eos_token_id=wrong)
    (folder / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id: not token ids"):
        load_model_spec(str(folder), CONFIG)


def test_name_that_is_no_folder_and_not_on_the_hub_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="baton-test/nowhere is no folder"):
        resolve("baton-test/nowhere")
    with pytest.raises(CheckpointError, match="no such/folder/at all is no folder"):
        resolve("no such/folder/at all")


def test_end_of_sequence_ids_come_from_the_generation_config_first(folder: Path) -> None:
    def eos() -> frozenset[int]:
        return load_model_spec(str(folder), CONFIG).eos_token_ids

    (folder / "generation_config.json").unlink(missing_ok=True)
    assert eos() == frozenset()
    change_config(folder, eos_token_id=7)
    assert eos() == {7}
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert eos() == {3, 4}


# --- the digest: no bit may differ unseen, however the work and the files are divided -------------

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

    def __init__(self, rank: int, size: int, parts: list[bytes], all_here: threading.Barrier):
        self.rank, self.size, self._parts, self._all_here = rank, size, parts, all_here

    def gather(self, value: bytes) -> list[bytes]:
        self._parts[self.rank] = value
        self._all_here.wait(timeout=30)
        return self._parts


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_that_share_the_work_find_what_one_finds_alone(tmp_path: Path, size: int) -> None:
    folder = save(tmp_path, TENSORS)
    parts = [b""] * size
    all_here = threading.Barrier(size)

    def of_rank(rank: int) -> str:
        with Checkpoint(folder) as checkpoint:
            return weights_digest(checkpoint, 2, RanksInThreads(rank, size, parts, all_here))

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(of_rank, range(size)))
    assert found == [digest_of(folder)] * size
    hashed = sorted(len(part) // 32 for part in parts)
    assert hashed[-1] - hashed[0] <= 3


def test_a_type_that_safetensors_cannot_read_is_named_with_its_file(tmp_path: Path) -> None:
    entry = {"dtype": "F6_E2M3", "shape": [16], "data_offsets": [0, 12]}
    header = json.dumps({"weight": entry}).encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE}: tensor weight: .*F6_E2M3"):
        digest_of(tmp_path)
