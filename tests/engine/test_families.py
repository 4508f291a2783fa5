"""The suite of `family_suite` passes for every family of the table, and fails for a broken one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers

from engine.errors import ModelError
from engine.kernels.protocol import Activation
from engine.models.config import ModelConfig
from engine.models.families import table
from tests.engine import families
from tests.engine.family_suite import CHECKS, Tenant, check_config, check_logits, check_two_ranks

_FIRST_OF = {name: row for row, (name, _) in reversed(families.FAMILIES.items())}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def tenant_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tenant]:
    @lru_cache
    def tenant(row: str) -> Tenant:
        return Tenant.made(row, tmp_path_factory.mktemp(row))

    return tenant


def test_every_family_of_the_table_has_a_tiny_model() -> None:
    assert {f"{name}ForCausalLM" for name in _FIRST_OF} == set(table.FAMILIES)


def cells() -> list[Any]:
    """All checks for all tiny models; two processes, which take longest, once for each family."""
    return [
        pytest.param(
            *(row, check),
            marks=()
            if check is not check_two_ranks or row == _FIRST_OF[name]
            else pytest.mark.full,
            id=f"{row}-{check.__name__}",
        )
        for row, (name, _) in families.FAMILIES.items()
        for check in CHECKS
    ]


@pytest.mark.parametrize(("row", "check"), cells())
def test_a_family_is_that_of_transformers(
    tenant_of: Callable[[str], Tenant], row: str, check: Callable[[Tenant], None]
) -> None:
    check(tenant_of(row))


Broken = Callable[[ModelConfig], ModelConfig]
_BROKEN: dict[str, tuple[str, Broken]] = {
    "windows": ("gemma3", lambda c: replace(c, windows=(None,) * c.num_layers)),
    "a window one too wide": ("mistral", lambda c: replace(c, windows=(41,) * c.num_layers)),
    "one rope": ("gemma3", lambda c: replace(c, ropes=c.ropes[:1] * c.num_layers)),
    "ropes exchanged": ("gemma3", lambda c: replace(c, ropes=(*c.ropes[1:], c.ropes[1]))),
    "gate": ("gemma3", lambda c: replace(c, activation=Activation.SILU)),
    "scale of scores": ("gemma3", lambda c: replace(c, attention_scale=c.head_dim**-0.5)),
    "scale of embeddings": ("gemma3", lambda c: replace(c, embedding_scale=1.0)),
    "offset of norms": ("gemma3", lambda c: replace(c, norm_offset=0.0)),
    "eps of norms": ("llama", lambda c: replace(c, rms_norm_eps=1e-3)),
    "norms of heads": ("qwen3", lambda c: replace(c, qk_norm=False)),
    "biases": ("qwen2", lambda c: replace(c, qkv_bias=False)),
    "norms exchanged": (
        "gemma3",
        lambda c: replace(
            c,
            names=replace(
                c.names,
                attention_out_norm=c.names.mlp_out_norm,
                mlp_out_norm=c.names.attention_out_norm,
            ),
        ),
    ),
    "weights of experts": (
        "qwen3-moe",
        lambda c: replace(c, moe=c.moe and replace(c.moe, normalise=False)),
    ),
}


@pytest.mark.parametrize("broken", _BROKEN)
def test_the_suite_fails_for_a_family_that_is_read_wrong(
    tenant_of: Callable[[str], Tenant], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    row, harm = _BROKEN[broken]
    architecture = f"{families.FAMILIES[row][0]}ForCausalLM"
    read = table.FAMILIES[architecture]
    monkeypatch.setitem(table.FAMILIES, architecture, lambda hf: harm(read(hf)))
    with pytest.raises((AssertionError, ModelError)):
        check_logits(tenant_of(row))


def test_the_suite_fails_for_a_default_that_is_not_the_published_one(
    tenant_of: Callable[[str], Tenant], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = table.FAMILIES["Gemma3ForCausalLM"]
    over = {"rope_local_base_freq": 20000.0}
    monkeypatch.setitem(table.FAMILIES, "Gemma3ForCausalLM", lambda hf: read(hf.over(over)))
    with pytest.raises(AssertionError):
        check_config(tenant_of("gemma3"))
