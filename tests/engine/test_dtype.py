"""`dtype: auto`: the checkpoint's own where the devices compute in it, with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.config.engine import EngineConfig
from engine.errors import ModelError
from engine.request import RequestId, ScheduledSeq, StepPlan
from engine.run.auto_choice import choose_dtype, main
from engine.run.build import load_model_spec
from tests.engine import checkpoints
from tests.engine.driving import set_up

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def folder_of(path: Path, *, named: dict[str, str | None]) -> str:
    """A folder whose config.json says `named`."""
    (path / "config.json").write_text(json.dumps(named))
    return str(path)


def cpu_with(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    capabilities = {
        "avx512_f": True,
        "avx512_bf16": False,
        "amx_bf16": False,
        "architecture": "x86_64",
    }
    capabilities |= dict.fromkeys(features, True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)


@pytest.mark.parametrize(
    ("own", "features", "devices", "chosen"),
    [
        ("bfloat16", ["avx512_bf16"], ["cpu"], "bfloat16"),
        ("bfloat16", ["bf16"], ["cpu"], "bfloat16"),
        ("bfloat16", [], ["cpu"], "float32"),
        ("float16", ["amx_bf16"], ["cpu"], "bfloat16"),
        ("float16", [], ["cpu"], "float32"),
        ("float32", ["avx512_bf16"], ["cpu"], "float32"),
        ("float32", [], ["cuda"], "float32"),
        ("bfloat16", [], ["cuda"], "bfloat16"),
        ("float16", [], ["cuda"], "float16"),
        ("bfloat16", [], ["cpu", "cuda"], "float32"),
        ("float16", ["avx512_bf16"], ["cpu", "cuda"], "bfloat16"),
    ],
)
def test_auto_is_the_checkpoints_dtype_where_all_devices_compute_in_it(
    own: str,
    features: list[str],
    devices: list[str],
    chosen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpu_with(monkeypatch, *features)
    choice = choose_dtype(folder_of(tmp_path, named={"torch_dtype": own}), devices)
    assert choice.dtype == chosen
    if chosen == own:
        assert choice.reason == "the checkpoint's own dtype"
    else:
        assert f"is in {own}, for which the cpu here has no instructions" in choice.reason


def test_a_gpu_without_bf16_computes_bf16_checkpoints_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    choice = choose_dtype(folder_of(tmp_path, named={"torch_dtype": "bfloat16"}), ["cuda"])
    assert choice.dtype == "float32"


def test_a_torch_that_does_not_know_what_a_cpu_has_gives_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    folder = folder_of(tmp_path, named={"torch_dtype": "bfloat16"})
    assert choose_dtype(folder, ["cpu"]).dtype == "float32"


def test_the_own_dtype_is_what_the_config_names_or_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def own(named: dict[str, str | None]) -> str:
        return choose_dtype(folder_of(tmp_path, named=named), ["cuda"]).dtype

    assert own({"torch_dtype": "float16"}) == "float16"
    assert own({"dtype": "float16"}) == "float16"  # as transformers writes it since version 5
    for named, wrong in (({"torch_dtype": "float64"}, "'float64'"), ({}, "None")):
        with pytest.raises(ModelError, match=f"torch_dtype names no .*{wrong}.*: set engine.dt"):
            own(named)  # type: ignore[arg-type]


def test_what_is_chosen_or_wrong_is_printed_for_those_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu_with(monkeypatch)
    folder = folder_of(tmp_path, named={"torch_dtype": "bfloat16"})
    main("--model", folder, "--devices", "cpu")
    chosen, dtype = json.loads(capsys.readouterr().out), choose_dtype(folder, ["cpu"])
    assert (chosen["dtype"], chosen["dtype_reason"]) == (dtype.dtype, dtype.reason)
    (tmp_path / "config.json").unlink()
    main("--model", folder, "--devices", "cpu")
    assert "config.json is missing" in json.loads(capsys.readouterr().out)["error"]


def test_auto_is_in_the_layout_and_the_fingerprint_as_the_dtype_it_became_and_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints.save("llama", tmp_path)
    config_file = tmp_path / "config.json"
    config = json.loads(config_file.read_text()) | {"dtype": "bfloat16"}
    config_file.write_text(json.dumps(config))
    for features, dtype in (["avx512_bf16"], "bfloat16"), ([], "float32"):
        cpu_with(monkeypatch, *features)
        caplog.clear()
        with caplog.at_level("INFO", "engine.run.torch_engine"):
            auto, explicit = (
                load_model_spec(str(tmp_path), EngineConfig(dtype=name)) for name in ("auto", dtype)
            )
        assert {t.dtype for group in auto.layout.groups for t in group.tensors} == {dtype}
        assert auto == explicit
        (said,) = caplog.messages  # of the one that decided
        assert f"computing in {dtype}: " in said


def test_a_model_is_computed_in_the_dtype_of_its_kv(tmp_path: Path) -> None:
    oracle = checkpoints.save("llama", tmp_path)  # in float32: that is what auto means here
    prompt = list(range(1, 30))
    with torch.inference_mode():
        exact = oracle(torch.tensor([prompt])).logits[0, -1]
    errors = {}
    for dtype in ("auto", "float16", "bfloat16"):
        setup = set_up(tmp_path, EngineConfig(dtype=dtype, num_blocks=40, num_threads=1))
        expected = DTYPES["float32" if dtype == "auto" else dtype]
        assert setup.runner._kv.layers[0].keys.dtype == expected
        seq = ScheduledSeq(
            RequestId("r"),
            np.array(prompt, dtype=np.uint32),
            0,
            (np.array([1, 2], dtype=np.int32),),
            True,
        )
        logits = setup.runner.run_step(StepPlan(1, (seq,)))
        assert logits is not None
        errors[dtype] = float((logits[0] - exact).norm() / exact.norm())
    # Bits of a mantissa: 24, 11 and 8.
    assert errors["auto"] < 1e-4 < errors["float16"] < errors["bfloat16"] / 2 < 0.05
