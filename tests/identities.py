"""One cluster's identities: of what a test makes in its own process, and of what it starts."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

from baton.config.internal import FOLDER_VARIABLE
from baton.identity.identity import Identity, make_keys
from baton.identity.keys import ROLES, Keys, Role

ROOT = bytes(range(32))


def identity(role: Role, root: bytes = ROOT) -> Identity:
    return Identity(role, keys=Keys.of_root(root, role))


ROUTER, WORKER, OPERATOR = map(identity, ROLES)


def used_everywhere(folder: Path) -> None:
    """This process and its children take theirs from `folder` where they are told of no other one,
    and `baton up` records nothing outside it."""
    with mock.patch("baton.identity.identity.make_root", return_value=ROOT):
        make_keys(folder / "identity")
    os.environ[FOLDER_VARIABLE] = str(folder / "identity")
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
