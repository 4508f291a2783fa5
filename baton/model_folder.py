"""A model's folder, fetched before anything that needs it starts, and its files about text.

`python -m baton.model_folder --name NAME [--revision REVISION]` is what a worker pod's init
container runs where the model is named on the hub.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from baton import render
from baton.errors import ConfigError
from baton.model_files import file_in

Report = Callable[[str], None]

CONFIG = "config.json"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_name(model: str) -> bool:
    """Whether it can be a name on the Hugging Face hub."""
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
    """The text files of a model's folder.

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


# --- a pod's init container -----------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m baton.model_folder", description="have a hub's model in this node's cache"
    )
    parser.add_argument("--name", required=True, help="on the hub, or a folder that is here")
    parser.add_argument("--revision", help="a branch, tag or commit; else the main branch")
    options = parser.parse_args()
    # Signals without a handler do not end the first process of a container.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    report = partial(print, flush=True)
    try:
        if file_in(Path(options.name), CONFIG):  # its name may look like one on the hub
            report(f"{options.name} is there")
        elif not is_hub_name(options.name):
            raise ConfigError(f"{options.name} holds no {CONFIG}", field="model")
        else:
            report(f"it is in {fetch_from_hub(options.name, options.revision, report, report)}")
    except ConfigError as error:
        print(f"cannot fetch the model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
