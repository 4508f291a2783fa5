"""What a Hugging Face model folder says about text: read once, checked, handed on frozen."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.model_folder import is_hub_name

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")

_TEXT_FILES = ["*.json", "chat_template.jinja"]
_NOT_READ = ["*/*"]  # nothing in a subfolder is


@dataclass(frozen=True)
class SamplingDefaults:
    """What the model's own generation_config.json asks for where a request says nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class ModelFiles:
    folder: Path
    tokenizer_path: Path
    chat_template: str | None
    special_tokens: Mapping[str, str]
    """Name to text, for example "bos_token": "<s>"; what a chat template may use."""
    eos_token_ids: frozenset[int]
    """From generation_config.json, else config.json; the tokenizer's own is added later."""
    vocab_size: int | None
    max_model_len: int | None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


def read_model_files(
    model: str | Path, revision: str | None = None, tokenizer: str | None = None
) -> ModelFiles:
    """Read all text-related files of a folder, or of a `revision` of a model on the hub.

    `tokenizer`: a folder or a name on the hub, from which tokenizer, special tokens and chat
    template are read instead. Raises ConfigError naming the file that is wrong.
    """
    root = _find(model, revision, "model")
    text = root if tokenizer is None else _find(tokenizer, None, "tokenizer")
    tokenizer_path = text / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise ConfigError(
            f"{tokenizer_path}: missing; the router needs the tokenizers library's file: set "
            "tokenizer to a folder or a name on the hub that has it",
            field="tokenizer",
        )
    tokenizer_config = _read_json(text / "tokenizer_config.json")
    config = _read_json(root / "config.json")
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        config = {**config, **text_config}
    generation = _read_json(root / "generation_config.json")
    eos = generation.get("eos_token_id")
    if eos is None:  # null says nothing: what the engine reads too
        eos = config.get("eos_token_id")
    return ModelFiles(
        folder=root,
        tokenizer_path=tokenizer_path,
        chat_template=_chat_template(text, tokenizer_config),
        special_tokens=_special_tokens(text, tokenizer_config),
        eos_token_ids=_token_ids(root, eos),
        vocab_size=_size(root, config, "vocab_size"),
        max_model_len=_size(root, config, "max_position_embeddings"),
        defaults=_sampling_defaults(root, generation),
    )


def _find(model: str | Path, revision: str | None, field: str) -> Path:
    """The folder itself, or where the Hugging Face hub's files of that name lie (fetched once)."""
    if Path(model).is_dir():
        return Path(model)
    if not is_hub_name(str(model)):
        raise ConfigError(
            f"{model}: no such {field} folder, and not a name on the Hugging Face hub", field=field
        )
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(
            f"{model}: no such {field} folder; to fetch it, install huggingface_hub", field=field
        ) from error
    try:
        return Path(
            huggingface_hub.snapshot_download(
                str(model),
                revision=revision,
                allow_patterns=_TEXT_FILES,
                ignore_patterns=_NOT_READ,
            )
        )
    except (OSError, ValueError) as error:  # the hub's own errors are among these
        named = f"{model}, revision {revision}" if revision else model
        raise ConfigError(
            f"{named}: cannot be fetched from the Hugging Face hub: {error}", field=field
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a JSON object is expected")
    return value


def _chat_template(root: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    path = root / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{root / 'tokenizer_config.json'}: chat_template: text is expected")
    return template


def _special_tokens(root: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for source in (_read_json(root / "special_tokens_map.json"), tokenizer_config):
        for name in SPECIAL_TOKEN_NAMES:
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                tokens[name] = value
    return tokens


def _token_ids(root: Path, value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and item >= 0 for item in values):
        raise ConfigError(f"{root}: eos_token_id: token ids are expected, not {value!r}")
    return frozenset(values)


def _size(root: Path, config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"{root / 'config.json'}: {name}: a number is expected, not {value!r}")
    return value


def _sampling_defaults(root: Path, generation: Mapping[str, Any]) -> SamplingDefaults:
    base = SamplingDefaults()
    values: dict[str, Any] = {}
    path = root / "generation_config.json"
    for name, default in vars(base).items():
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{path}: {name}: a number is expected, not {value!r}")
        if value < 0 or not math.isfinite(value):
            raise ConfigError(f"{path}: {name}: a number from 0 on is expected, not {value!r}")
        values[name] = type(default)(value)
    if generation.get("do_sample") is False:
        values["temperature"] = 0.0
    return replace(base, **values)
