"""A model's files about text: tokenizer, chat template, ends. Workers find them, and routers read
them from workers."""

from __future__ import annotations

from pathlib import Path

from baton.errors import ConfigError
from baton.model_folder import is_hub_name

OF_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
OF_MODEL = ("config.json", "generation_config.json")
TEXT_FILES = (*OF_TOKENIZER, *OF_MODEL)


def find_text_files(
    model: str | Path, revision: str | None = None, tokenizer: str | None = None
) -> list[Path]:
    """The text files of a folder, or of a `revision` of a model on the hub, fetched when needed.

    `tokenizer`: a folder or a name on the hub, from which tokenizer, special tokens and chat
    template are taken instead. Raises ConfigError where there is no tokenizer.
    """
    root = _find(model, revision, "model")
    text = root if tokenizer is None else _find(tokenizer, None, "tokenizer")
    if not (text / OF_TOKENIZER[0]).is_file():
        raise ConfigError(
            f"{text / OF_TOKENIZER[0]}: missing; routers need the tokenizers library's file: set "
            "tokenizer to a folder or a name on the hub that has it",
            field="tokenizer",
        )
    paths = [text / name for name in OF_TOKENIZER] + [root / name for name in OF_MODEL]
    return [path for path in paths if path.is_file()]


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
                str(model), revision=revision, allow_patterns=list(TEXT_FILES)
            )
        )
    except (OSError, ValueError) as error:  # the hub's own errors are among these
        named = f"{model}, revision {revision}" if revision else model
        raise ConfigError(
            f"{named}: cannot be fetched from the Hugging Face hub: {error}", field=field
        ) from error
