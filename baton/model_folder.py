"""A model's folder, fetched before anything that needs it starts, and its files about text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from baton import render
from baton.errors import ConfigError
from baton.model_files import file_in

Report = Callable[[str], None]

CONFIG = "config.json"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_name(model: str) -> bool:
    """Tell whether this can be a name on the Hugging Face hub."""
    return _HUB_NAME.fullmatch(model) is not None


def fetch_from_hub(name: str, revision: str | None, announce: Report, detail: Report) -> str:
    """Fetch a model and return its folder. `detail` gets every per cent.

    A child process fetches, in a session of its own: a terminal's interrupt reaches only this
    process, which ends the child.
    """
    named = f"{name} ({revision})" if revision else name
    announce(f"fetching {named} from the Hugging Face hub")
    command = [sys.executable, "-m", "engine.models.checkpoint.hub", name]
    if revision is not None:
        command.append(revision)
    shown_percent = -1
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                report = json.loads(line)
                if "folder" in report:
                    return str(report["folder"])
                if "error" in report:
                    raise ConfigError(report["error"], field="model")
                fetched, total = report["fetched_bytes"], report["total_bytes"]
                percent = 100 * fetched // max(1, total)
                if percent != shown_percent:
                    shown_percent = percent
                    detail(f"{render.num_bytes(fetched)} of {render.num_bytes(total)}")
        finally:
            process.terminate()
    raise ConfigError(f"{name}: fetching it ended with status {process.returncode}", field="model")


# --- files about text -----------------------------------------------------------------------------


OF_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
OF_MODEL = ("config.json", "generation_config.json")
TEXT_FILES = (*OF_TOKENIZER, *OF_MODEL)


def find_text_files(model: str | Path, tokenizer: str | None = None) -> list[Path]:
    """Return the text files of a model's folder.

    `tokenizer`: a folder or a name on the hub, from which tokenizer, special tokens and chat
    template are taken instead. Raises ConfigError where there is no tokenizer.
    """
    root = Path(model)
    if not root.is_dir():
        raise ConfigError(
            f"{model}: no such model folder, and not a name on the Hugging Face hub", field="model"
        )
    text = root if tokenizer is None else _tokenizer_folder(tokenizer)
    if file_in(text, OF_TOKENIZER[0]) is None:
        raise ConfigError(
            f"{text / OF_TOKENIZER[0]}: missing; routers need the tokenizers library's file: set "
            "tokenizer to a folder or a name on the hub that has it",
            field="tokenizer",
        )
    found = [file_in(text, name) for name in OF_TOKENIZER]
    found += [file_in(root, name) for name in OF_MODEL]
    return [path for path in found if path is not None]


def _tokenizer_folder(tokenizer: str) -> Path:
    """Return the folder itself, or where the Hugging Face hub's files of that name lie (fetched
    once)."""
    if Path(tokenizer).is_dir():
        return Path(tokenizer)
    problem = f"{tokenizer}: no such tokenizer folder"
    if not is_hub_name(tokenizer):
        problem += ", and not a name on the Hugging Face hub"
        raise ConfigError(problem, field="tokenizer")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(tokenizer, allow_patterns=list(OF_TOKENIZER)))
    except ImportError as error:
        raise ConfigError(
            f"{problem}; to fetch it, install huggingface_hub", field="tokenizer"
        ) from error
    except (OSError, ValueError) as error:  # the hub's own errors are among these
        problem = f"{tokenizer}: cannot be fetched from the Hugging Face hub: {error}"
        raise ConfigError(problem, field="tokenizer") from error
