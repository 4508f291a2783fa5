"""`baton size` against figures that are known, and against transformers' own models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from cli.main import main
from engine.models.families.table import model_config
from engine.models.roofline import RankCost
from tests.engine.families import FAMILIES, hf_config

Capture = pytest.CaptureFixture[str]
DEMO = str(Path(__file__).resolve().parents[2] / "models" / "demo")
A100 = ("--bandwidth-gbs", "2000", "--tflops", "312", "--memory-gb")
ON_EIGHT = ("--gpu", "h100", "--tp", "8", "--prompt", "3584", "--answer", "512")
NAMES = (
    *("hidden_size", "intermediate_size", "vocab_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "tie_word_embeddings"),
)
B7 = (4096, 11008, 127913, 32, 32, 32, True)  # 7.0e9 parameters
B70 = (8192, 28672, 128256, 80, 64, 8, False)


def sized(folder: Path, shape: tuple[int, ...], capsys: Capture, *options: str) -> dict[str, Any]:
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config | dict(zip(NAMES, shape))))
    assert main(["size", str(folder), *options, "--output", "json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_known_answers(tmp_path: Path, capsys: Capture) -> None:
    found = sized(tmp_path, B7, capsys, *A100, "80", "--context", "1")
    assert round(found["one_stream_tokens_a_s"]) == 143
    assert found["bound_by_compute_from_flop_a_byte"] == 156
    found = sized(tmp_path, B7, capsys, *A100, "80", "--context", "4096")
    assert found["kv_a_stream_bytes"] == 2 << 30
    # Of 89 GB 0.9 are used: 80.
    found = sized(tmp_path, B70, capsys, *A100, "89", "--tp", "8", "--context", "4096")
    assert (found["kv_a_token_bytes"], found["kv_a_token_and_gpu_bytes"]) == (320 << 10, 40 << 10)
    assert found["free_for_kv_a_gpu_bytes"] == pytest.approx(62.5e9, rel=3e-3)
    assert found["streams_by_memory"] == pytest.approx(372, abs=1)


def test_memory_or_the_itl_binds_and_pools_carry_the_rate(tmp_path: Path, capsys: Capture) -> None:
    found = sized(tmp_path, B70, capsys, *ON_EIGHT, "--rate", "200")
    assert found["bound_by"] == "memory"
    streams = 200 * 512 * found["itl_s"]
    assert found["decode_gpus"] == pytest.approx(8 * streams / found["streams_by_memory"] / 0.8)
    # At such rates queues are short, and the planner keeps a fifth of the workers' time free.
    assert found["prefill_gpus"] == pytest.approx(8 * 200 * found["prefill_s"] / 0.8, rel=0.01)
    link = 3584 * found["kv_a_token_and_gpu_bytes"] / found["prefill_s"] / 1e9
    assert found["disaggregation_pays_from_gb_a_s_and_gpu"] == pytest.approx(link)
    tight = sized(tmp_path, B70, capsys, *ON_EIGHT, "--slo", "0.1", "0.01")
    assert tight["bound_by"] == "ITL"
    one_more_s = tight["itl_s"] + 4096 * tight["kv_a_token_and_gpu_bytes"] / 3350e9
    assert tight["itl_s"] <= 0.01 < one_more_s
    assert tight["prompts_by_ttft"] == 0.1 // tight["prefill_s"]
    nothing = sized(tmp_path, B70, capsys, *ON_EIGHT, "--slo", "1", "0.001")
    assert (nothing["streams_by_itl"], nothing["decode_gpus"]) == (0, None)
    assert main(["size", str(tmp_path), "--gpu", "L4", "--context", "9"]) == 2
    assert "--tp 1: too few for weights: 141 GB a GPU" in capsys.readouterr().err


def test_the_table_is_aligned_and_explained(capsys: Capture) -> None:
    assert main(["size", DEMO, "--gpu", "L4", "--context", "1000", "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (kv,) = (line for line in lines if line.startswith("KV a token  "))
    formula = "2 * 5 layers * 64 * 2 bytes * KV heads: 2"
    assert kv.index(formula) == lines[1].index("formula")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--context 9 --memory-gb 80 --tflops 9", "--gpu is missing: known are A100-40GB"),
        ("--context 9 --gpu H101", "--gpu H101: known are A100-40GB, A100-80GB, H100"),
        ("--gpu L4 --context 5000", "--context, or --prompt and --answer: 1 to 4096, not 5000"),
        ("--gpu L4 --context 9 --tp 3", "MODEL or --tp: "),
    ],
)
def test_errors_name_the_argument(options: str, named: str, capsys: Capture) -> None:
    assert main(["size", DEMO, *options.split()]) == 2
    assert named in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_products_are_those_of_transformers_model(family: str) -> None:
    name, cost = FAMILIES[family][0], RankCost(model_config(hf_config(family)), "float16")
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model_class = getattr(transformers, f"{name}ForCausalLM")
        model = model_class(model_class.config_class(**hf_config(family)))
        if cost.config.moe is None:
            model(torch.zeros((1, 16), dtype=torch.long), logits_to_keep=1)
    matrices = 2 * sum(each.numel() for each in model.parameters() if each.dim() > 1)
    assert cost.weight_bytes == matrices
    read = matrices - 2 * model.lm_head.weight.numel()
    tied = cost.config.tie_word_embeddings
    assert cost.decode(1000, 0)[0] == pytest.approx(matrices if tied else read)
    if cost.config.moe is None:
        products, flops = cost.product_flops(16, 1), cost.prefill(16)[1]
        # torch counts attention as if no token were masked.
        assert counter.get_total_flops() == products + 2 * (flops - products)
