"""The trained demo model in bf16 beside transformers in float32: how far log-probabilities go."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

from baton.config.engine import EngineConfig
from engine.models.checkpoint.weights import SINGLE_FILE
from tests.engine.driving import Driver, argmax, set_up

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
PROMPTS: dict[str, Any] = {
    prompt["name"]: prompt for prompt in yaml.safe_load((DEMO / "prompts.yaml").read_text("utf-8"))
}
CHUNK = 256
EMITTED, ANY = 0.05, 0.3  # as docs/failures.md promises


@pytest.fixture(scope="module")
def oracle() -> Any:
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    return transformers.LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


class Answer:
    """A prompt and its greedy answer in float32, with the log-probabilities of all tokens."""

    def __init__(self, oracle: Any, name: str) -> None:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(DEMO)
        prompt = PROMPTS[name]
        self.prompt: list[int] = tokenizer.apply_chat_template(
            prompt["messages"], add_generation_prompt=True
        )["input_ids"]
        with torch.inference_mode():
            everything = oracle.generate(
                torch.tensor([self.prompt]),
                attention_mask=torch.ones(1, len(self.prompt), dtype=torch.long),
                max_new_tokens=prompt["max_tokens"],
                do_sample=False,
                temperature=None,
            )
            logits = oracle(everything).logits[0, len(self.prompt) - 1 : -1]
        self.tokens: list[int] = everything[0, len(self.prompt) :].tolist()
        self.logprobs: torch.Tensor = logits.log_softmax(-1)  # [answer, vocabulary]

    def errors(self, folder: Path, dtype: str) -> tuple[float, float]:
        """The engine's largest error, of the answer's own tokens and of any; it is given the
        answer, whatever it would say itself."""
        found: list[torch.Tensor] = []

        def record(logits: torch.Tensor, *scheduled: Any) -> Any:
            found.append(logits.clone())
            return argmax(logits, *scheduled)

        config = EngineConfig(dtype=dtype, num_blocks=100, num_threads=1)
        driver = Driver(set_up(folder, config, sample=record))
        driver.add(0, self.prompt, len(self.tokens))
        while (left := len(self.prompt) - driver.computed[0]) > 0:
            driver.step({0: min(CHUNK, left)})
        for token in self.tokens[:-1]:
            driver.tokens[0][-1] = token
            driver.step({0: 1})
        error = (torch.cat(found).log_softmax(-1) - self.logprobs).abs()
        own = error.gather(1, torch.tensor(self.tokens)[:, None])
        return float(own.max()), float(error.max())


@pytest.mark.parametrize("name", ["festival", "story", "newspaper-luke"])
def test_logprobs_in_bf16_are_near_those_in_float32(oracle: Any, name: str) -> None:
    answer = Answer(oracle, name)
    assert max(answer.errors(DEMO, "float32")) < 1e-3
    emitted, most = answer.errors(DEMO, "bfloat16")
    assert emitted < EMITTED
    assert 1e-2 < most < ANY  # unlikely tokens' logits are large, and rounded to bf16


def test_one_lost_head_of_one_layer_is_far_above_the_tolerance(oracle: Any, tmp_path: Path) -> None:
    for file in DEMO.glob("*.json"):
        shutil.copy(file, tmp_path)
    tensors = load_file(DEMO / SINGLE_FILE)
    tensors["model.layers.2.self_attn.o_proj.weight"][:, 64:128] = 0
    save_file(tensors, tmp_path / SINGLE_FILE)
    emitted, most = Answer(oracle, "story").errors(tmp_path, "bfloat16")
    assert emitted > 4 * EMITTED
    assert most > 4 * ANY
