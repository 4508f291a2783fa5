"""Tokenizers trained on the spot: byte-level BPE, and SentencePiece-like with byte fallback."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from baton.model_folder import find_text_files
from baton.v1 import router_pb2
from router.request.client_request import check_request
from router.request.validate import ParsedRequest, RequestLimits, parse_generate
from router.text import TextModel

SENTENCES = [
    "Once upon a time a fox lived near the river and sang to the moon.",
    "The miller asked the fox for bread, and the fox asked for a song.",
    "Über den Fluß ging der Müller; café, naïve, 你好世界, привет, שלום 🦊🌙 👩‍👩‍👧.",
    "  indented\n\ttext with  spaces\n\nand lines; 1234567890 times!",
]
CHATML = (
    "{{ bos_token }}{% for message in messages %}\n"
    "<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}\n"
)
CHAT_TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
NAMES = ("demo",)  # of the model


def load_text(model: str | Path, tokenizer: str | None = None) -> TextModel:
    return TextModel(find_text_files(model, tokenizer))


def parse(
    message: router_pb2.GenerateRequest,
    model: TextModel,
    limits: RequestLimits,
    names: tuple[str, ...] = NAMES,
    arrived_s: float = 0.0,
) -> ParsedRequest:
    return parse_generate(check_request(message, names, "drawn", arrived_s), model, limits)


@functools.cache
def _byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=CHAT_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer.to_str()


def byte_level_tokenizer() -> Tokenizer:
    return Tokenizer.from_str(_byte_level_json())


@functools.cache
def _sentencepiece_json(prepend: str) -> str:
    """Llama 2's construction ("Prepend" normalizer), or Metaspace with `prepend` as its scheme."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    legacy = prepend == "legacy"
    if legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement="▁", prepend_scheme=prepend, split=False
        )
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", *CHAT_TOKENS], show_progress=False
    )
    tokenizer.train_from_iterator([s for s in SENTENCES if s.isascii()], trainer)
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    vocab = spec["model"]["vocab"]
    for token in byte_tokens:
        vocab[token] = len(vocab)
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepend != "never":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer.to_str()


def sentencepiece_tokenizer(prepend: str = "legacy") -> Tokenizer:
    return Tokenizer.from_str(_sentencepiece_json(prepend))


def write_model(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    chat_template: str | None = CHATML,
    generation: dict[str, Any] | None = None,
    vocab_size: int | None = None,
) -> Path:
    """A Hugging Face folder with everything but weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": {"content": "</s>", "__type": "AddedToken"},
            }
        )
    )
    config = {
        "vocab_size": vocab_size or tokenizer.get_vocab_size(),
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.token_to_id("</s>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder
