"""Which files a checkpoint consists of: those about text, and the weights."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from baton.fetch.sources import FetchError, ForbiddenError, NotThereError, Source
from baton.model_folder import CONFIG, TEXT_FILES

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUMS = "SHA256SUMS"
"""The file that sha256sum writes. If there is one, it also lists the folder."""

_SMALL_BYTES = 64 << 20
_FILE_NAME = re.compile(r"[\w][\w.+-]*")


@dataclass(frozen=True)
class WantedFile:
    name: str
    is_needed: bool = True
    """False: the file may be missing."""
    sha256: str | None = None


@dataclass(frozen=True)
class Wanted:
    files: tuple[WantedFile, ...]
    weights_bytes: int | None = None
    """Bytes of the weights by the index. None: the index has no total, or no weights are wanted."""


def wanted_files(source: Source, text_only: bool) -> Wanted:
    """List what to fetch of a checkpoint. Raises FetchError."""
    sums = read_sums(source)
    names = frozenset(sums) if sums else source.names()
    if names is not None and CONFIG not in names:
        raise NotThereError(
            f"{source.where(CONFIG)} is not among its files: the URI is the folder that holds it"
        )
    text = [
        WantedFile(name, name == CONFIG or names is not None, sums.get(name))
        for name in TEXT_FILES
        if names is None or name in names
    ]
    if text_only:
        return Wanted(tuple(text))
    weights, weights_bytes = _weights(source, names)
    return Wanted((*text, *(WantedFile(n, sha256=sums.get(n)) for n in weights)), weights_bytes)


def read_sums(source: Source) -> Mapping[str, str]:
    """Read the digest of each file by its name; none if the folder holds none."""
    text = _small(source, SUMS)
    if text is None:
        return {}
    found = {}
    for line in text.decode(errors="replace").splitlines():
        if match := re.fullmatch(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)", line.strip()):
            found[match.group(2)] = match.group(1).lower()
    if not found:
        raise FetchError(f"{source.where(SUMS)}: not what sha256sum writes")
    return found


def _weights(source: Source, names: frozenset[str] | None) -> tuple[list[str], int | None]:
    """Choose the files of weights as the engine does: a single file is the whole model."""
    if names is not None and SINGLE in names:
        return [SINGLE], None
    text = _small(source, INDEX) if names is None or INDEX in names else None
    if text is None:
        if names is None:
            return [SINGLE], None
        raise NotThereError(f"{source.where(SINGLE)} is not there, nor is {INDEX}")
    try:
        index = json.loads(text)
        shards = sorted(set(index["weight_map"].values()))
        total = index.get("metadata", {}).get("total_size")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FetchError(f"{source.where(INDEX)}: no index of weights: {error!r}") from error
    for name in shards:
        if not isinstance(name, str) or _FILE_NAME.fullmatch(name) is None:
            raise FetchError(f"{source.where(INDEX)}: {name!r} is no name of a file beside it")
    return [INDEX, *shards], total if isinstance(total, int) else None


def _small(source: Source, name: str) -> bytes | None:
    """Read a small file whole; None if it is missing."""
    found = b""
    try:
        with source.read(name) as content:
            for chunk in content.chunks:
                found += chunk
                if len(found) > _SMALL_BYTES:
                    raise FetchError(f"{source.where(name)}: larger than any such file")
    except (NotThereError, ForbiddenError):
        return None
    return found


# --- a tar file -----------------------------------------------------------------------------------


ARCHIVES = (".tar", ".tar.gz", ".tgz")


def unpack(archive: Path, folder: Path, text_only: bool) -> None:
    """Unpack the checkpoint's files, which lie beside its config.json. Only their last names count,
    so nothing is written outside `folder`. Raises FetchError and OSError."""
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
