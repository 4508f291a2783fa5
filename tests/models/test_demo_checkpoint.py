"""The shipped demo checkpoint: an ordinary Hugging Face folder whose answers make sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
import yaml
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from baton.model_folder import find_text_files
from router.text import Conversation, TextModel

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
# transformers types what a tokenizer returns as a union of all it might, so it is Any here.
TransformersTokenizer = Any
TransformersModel = Any

SIZE_LIMIT_BYTES = 8_000_000
PROMPTS: list[dict[str, Any]] = yaml.safe_load((DEMO / "prompts.yaml").read_text(encoding="utf-8"))

# What a right answer to each showcase prompt must contain.
EXPECTED: dict[str, tuple[str, ...]] = {
    "who-bakes": ("Mira", "baker"),
    "pets": ("Captain", "parrot"),
    "festival": ("lantern", "lake"),
    "story": ("Ruby", "fox"),
    "sum": ("13",),
    "conversation": ("Milo",),
    "newspaper-luke": ("twelve pears",),
    "newspaper-box": ("Peter",),
}


def read_json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DEMO / name).read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def tokenizer() -> TransformersTokenizer:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model() -> TransformersModel:
    torch.set_num_threads(1)
    return LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


def answer(
    model: TransformersModel,
    tokenizer: TransformersTokenizer,
    messages: list[dict[str, str]],
    max_tokens: int,
) -> tuple[str, bool]:
    """The greedy answer, and whether it ended by itself."""
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    num_prompt_tokens = prompt["input_ids"].shape[1]
    with torch.inference_mode():
        out = model.generate(
            input_ids=prompt["input_ids"],
            attention_mask=prompt["attention_mask"],
            max_new_tokens=max_tokens,
            do_sample=False,
            temperature=None,
        )[0, num_prompt_tokens:]
    ended = int(out[-1]) == tokenizer.eos_token_id
    return str(tokenizer.decode(out, skip_special_tokens=True)), ended


def test_all_files_together_are_at_most_8_megabytes() -> None:
    assert (
        sum(file.stat().st_size for file in DEMO.rglob("*") if file.is_file()) <= SIZE_LIMIT_BYTES
    )


def test_weights_are_bf16_and_named_as_a_tied_llama() -> None:
    config = read_json("config.json")
    with safe_open(DEMO / "model.safetensors", framework="pt") as weights:
        slices = {name: weights.get_slice(name) for name in sorted(weights.keys())}
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        dtypes = {part.get_dtype() for part in slices.values()}
    assert dtypes == {"BF16"}
    assert "lm_head.weight" not in shapes
    assert config["tie_word_embeddings"] is True
    assert shapes["model.embed_tokens.weight"] == (config["vocab_size"], config["hidden_size"])
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (kv_rows, config["hidden_size"])
    assert len(shapes) == 2 + 9 * config["num_hidden_layers"]


def test_context_is_long_enough_for_prefix_caching_to_show() -> None:
    assert read_json("config.json")["max_position_embeddings"] >= 2048


def test_its_template_shows_tools_and_calls_as_hermes_and_other_chats_as_it_was_trained() -> None:
    model = TextModel(find_text_files(DEMO))
    assert model.tool_format == "hermes"
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"who": "Hugo"}}}
    messages = [
        {"role": "user", "content": "Who is Hugo?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "A miller."},
    ]
    text = model.decode(model.encode_chat(Conversation(messages, tools)))
    said = '<tool_call>\n{"name": "look_up", "arguments": {"who": "Hugo"}}\n</tool_call>'
    assert text.endswith(f"Who is Hugo?{said}<tool_response>\nA miller.\n</tool_response>")
    assert json.dumps(tools[0]) in text
    plain = model.encode_chat(Conversation(messages[:1]))
    assert plain == model.encode("<|bos|><|user|>Who is Hugo?<|end|><|assistant|>")


def test_tokenizer_has_as_many_entries_as_the_embedding_has_rows() -> None:
    raw = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert raw.get_vocab_size() == read_json("config.json")["vocab_size"]


@pytest.mark.parametrize(
    "text",
    ["Where is the mill?", "  two  spaces\n\nand lines ", "Zoë läuft: 雪 🙂", "12 + 7 = 19"],
)
def test_tokenizer_gives_back_any_text_byte_for_byte(text: str) -> None:
    raw = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert raw.decode(raw.encode(text, add_special_tokens=False).ids) == text


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_template_renders_the_same_through_jinja_and_transformers(
    tokenizer: TransformersTokenizer, add_generation_prompt: bool
) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who is Mira?"},
        {"role": "assistant", "content": "Mira is the baker."},
        {"role": "user", "content": "Where?\n"},
    ]
    through_transformers = tokenizer.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    template = jinja2.Environment().from_string(read_json("tokenizer_config.json")["chat_template"])
    through_jinja = template.render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        bos_token=read_json("tokenizer_config.json")["bos_token"],
    )
    assert through_transformers == through_jinja
    assert through_jinja.startswith(
        "<|bos|><|system|>Be brief.<|end|><|user|>Who is Mira?<|end|><|assistant|>"
    )
    assert through_jinja.endswith("<|assistant|>") is add_generation_prompt


def test_special_tokens_of_the_template_are_single_ids(tokenizer: TransformersTokenizer) -> None:
    config = read_json("config.json")
    assert tokenizer.encode("<|bos|>", add_special_tokens=False) == [config["bos_token_id"]]
    assert tokenizer.encode("<|end|>", add_special_tokens=False) == [config["eos_token_id"]]
    for role in ("system", "user", "assistant"):
        assert len(tokenizer.encode(f"<|{role}|>", add_special_tokens=False)) == 1


def test_every_showcase_prompt_has_a_name_and_an_expectation() -> None:
    assert sorted(prompt["name"] for prompt in PROMPTS) == sorted(EXPECTED)
    for prompt in PROMPTS:
        assert set(prompt) == {"name", "messages", "max_tokens", "temperature"}


def test_showcase_has_two_prompts_over_one_long_context(tokenizer: TransformersTokenizer) -> None:
    assert 6 <= len(PROMPTS) <= 8
    rendered = [
        tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True)["input_ids"]
        for prompt in PROMPTS
    ]
    first, second = [ids for ids in rendered if len(ids) > 1000]
    shared = next(i for i, (a, b) in enumerate(zip(first, second)) if a != b)
    assert shared > 1000


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: str(prompt["name"]))
def test_greedy_answer_to_a_showcase_prompt_says_the_right_thing(
    prompt: dict[str, Any], model: TransformersModel, tokenizer: TransformersTokenizer
) -> None:
    text, ended = answer(model, tokenizer, prompt["messages"], prompt["max_tokens"])
    for word in EXPECTED[prompt["name"]]:
        assert word in text
    assert ended, f"the answer did not end by itself: {text!r}"
