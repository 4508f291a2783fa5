"""Keys of the roles: who signed what, for which purpose, and how a cluster changes its root."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.identity.keys import KEY_FILE, PUBLIC_FILE, ROLES, Keys, Role, make_root, role_files

ROOT, OTHER = make_root(), make_root()


def written(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("role", ROLES)
def test_everyone_tells_who_signed(role: Role) -> None:
    signature = Keys.of_root(ROOT, role).sign("link", [b"a", b"bc"])
    for checker in ROLES:
        keys = Keys.of_root(ROOT, checker)
        assert keys.verify([role], "link", [b"a", b"bc"], signature)
        assert not keys.verify(set(ROLES) - {role}, "link", [b"a", b"bc"], signature)
        assert not keys.verify([role], "call", [b"a", b"bc"], signature)
        assert not keys.verify([role], "link", [b"ab", b"c"], signature)
        assert not keys.verify(
            [role], "link", [b"a", b"bc"], bytes((signature[0] ^ 1,)) + signature[1:]
        )
        assert not keys.verify([role], "link", [b"a", b"bc"], b"")
    assert not Keys.of_root(OTHER, "router").verify(ROLES, "link", [b"a", b"bc"], signature)


def test_a_role_holds_its_own_key_alone(tmp_path: Path) -> None:
    private = {role: role_files(ROOT, role)[KEY_FILE].split()[1] for role in ROLES}
    for role in ROLES:
        held = b"".join(role_files(ROOT, role).values())
        assert [other for other in ROLES if private[other] in held] == [role]
        assert ROOT not in held


def test_a_cluster_goes_over_to_another_root_without_a_restart(tmp_path: Path) -> None:
    folders = {role: written(tmp_path / role, role_files(ROOT, role)) for role in ROLES}
    keys = {role: Keys.in_folder(folders[role], role) for role in ROLES}

    def understand(by: Role, to: Role) -> bool:
        return keys[to].verify([by], "link", [b"n"], keys[by].sign("link", [b"n"]))

    for files_of in (
        lambda role: role_files(ROOT, role, [OTHER]),
        lambda role: role_files(OTHER, role, [ROOT]),
        lambda role: role_files(OTHER, role),
    ):
        for changed in ROLES:  # one after the other, as pods see a changed Secret
            written(folders[changed], files_of(changed))
            assert all(understand(by, to) for by in ROLES for to in ROLES)
    former = Keys.of_root(ROOT, "router").sign("link", [b"n"])
    assert not keys["worker"].verify(["router"], "link", [b"n"], former)


@pytest.mark.parametrize(
    "harm",
    [
        {KEY_FILE: b"router"},
        {KEY_FILE: b"router !!\n"},
        {KEY_FILE: b"\xff\n"},
        {KEY_FILE: b""},
        {KEY_FILE: role_files(ROOT, "operator")[KEY_FILE]},
        {PUBLIC_FILE: b"router AAAA\n"},
    ],
)
def test_files_that_are_none_are_named_and_never_quoted(
    tmp_path: Path, harm: dict[str, bytes]
) -> None:
    folder = written(tmp_path / "router", role_files(ROOT, "router") | harm)
    with pytest.raises(ConfigError, match=r"internal.folder: .*router holds no role.key") as error:
        Keys.in_folder(folder, "router")
    assert error.value.field == "internal.folder"
    assert not any(word in error.value.message for word in ("AAAA", "!!"))
    (folder / KEY_FILE).unlink()
    with pytest.raises(ConfigError, match=r"role.key cannot be read: No such file"):
        Keys.in_folder(folder, "router")
