"""One cluster's identities: of what a test makes in its own process, and of what it starts."""

from __future__ import annotations

import os
from pathlib import Path

from baton.config.internal import FOLDER_VARIABLE
from baton.identity.identity import Identity
from baton.identity.keys import ROLES, Keys, Role, role_files

ROOT = bytes(range(32))


def identity(role: Role, root: bytes = ROOT) -> Identity:
    return Identity(role, keys=Keys.of_root(root, role))


ROUTER, WORKER, OPERATOR = map(identity, ROLES)


def written(folder: Path, root: bytes = ROOT) -> Path:
    """A folder of identities."""
    for role in ROLES:
        (folder / role).mkdir(parents=True, exist_ok=True)
        for name, data in role_files(root, role).items():
            (folder / role / name).write_bytes(data)
    return folder


def used_everywhere(folder: Path) -> None:
    """This process and its children take theirs from `folder` where they are told of no other one,
    and `baton up` records nothing outside it."""
    os.environ[FOLDER_VARIABLE] = str(written(folder / "identity"))
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
