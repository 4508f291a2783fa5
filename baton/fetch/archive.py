"""A checkpoint in a tar file."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path, PurePosixPath

from baton.fetch.checkpoint_files import CONFIG, TEXT_FILES
from baton.fetch.errors import FetchError

SUFFIXES = (".tar", ".tar.gz", ".tgz")


def unpack(archive: Path, folder: Path, text_only: bool) -> None:
    """The checkpoint's files, which lie where its config.json does. Only their last names are
    taken: nothing is written outside `folder`. Raises FetchError and OSError."""
    try:
        with tarfile.open(archive) as tar:
            members = [member for member in tar if member.isfile()]
            configs = [m for m in members if PurePosixPath(m.name).name == CONFIG]
            if not configs:
                raise FetchError(f"{archive.name} holds no {CONFIG}")
            root = min((PurePosixPath(m.name).parent for m in configs), key=lambda p: len(p.parts))
            for member in members:
                path = PurePosixPath(member.name)
                if path.parent == root and _is_wanted(path.name, text_only):
                    _copy(tar, member, folder / path.name)
    except (tarfile.TarError, EOFError) as error:
        raise FetchError(f"{archive.name} is no tar file: {error}") from error


def _is_wanted(name: str, text_only: bool) -> bool:
    is_weights = name.endswith((".safetensors", ".safetensors.index.json"))
    return name in TEXT_FILES or (is_weights and not text_only)


def _copy(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    content = tar.extractfile(member)
    assert content is not None, f"{member.name} is a file"
    with content, path.open("wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
