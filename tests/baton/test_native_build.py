"""Native code is compiled once, and only loaded from where nobody else could have put it."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baton import native_build
from baton.native_build import X86_64_V2, NativeBuildError, Recipe, build, build_ahead, cache_folder
from engine.kernels.native.recipe import KERNELS

TARGETS = (*KERNELS.targets, X86_64_V2)
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (source := tmp_path / "answer.c").write_text("int answer(void) { return 42; }\n")
    return Recipe("answer", (source,), ("-shared", "-fPIC"), ("cc",))


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The user's cache, and the folder for temporary files."""
    places = tmp_path / "cache", tmp_path / "temporary"
    for place in places:
        place.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(places[0]))
    monkeypatch.setattr(tempfile, "tempdir", str(places[1]))
    return places


@needs_compiler
def test_a_library_is_built_once_and_found_again(tmp_path: Path, recipe: Recipe) -> None:
    first = build(recipe, cache := tmp_path / "kept")
    assert ctypes.CDLL(str(first)).answer() == 42
    built_at = first.stat().st_mtime_ns
    assert build(recipe, cache) == first
    assert first.stat().st_mtime_ns == built_at
    assert list(cache.iterdir()) == [first]
    assert build(dataclasses.replace(recipe, flags=(*recipe.flags, "-O2")), cache) != first


def test_without_a_compiler_it_says_which_were_looked_for(tmp_path: Path, recipe: Recipe) -> None:
    missing = dataclasses.replace(recipe, compilers=("no-such-cc", "nor-this"))
    with pytest.raises(NativeBuildError, match=r"no compiler \(no-such-cc or nor-this\)"):
        build(missing, tmp_path / "kept")


def test_a_router_refuses_to_start_where_nothing_was_built_and_nothing_can_be(
    tmp_path: Path,
) -> None:
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "router", "--control", "127.0.0.1:1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    refusal = (
        "router: block_hash can neither be loaded nor compiled here: no compiler (cc or gcc or"
    )
    assert refusal in done.stderr
    assert len(done.stderr.splitlines()) == 1


def failing(folder: Path, name: str) -> str:
    """A compiler that notes each of its calls that compiles, and fails."""
    compiler = folder / name
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit\n'
        f"echo call >> {folder}/calls\necho {name} cannot >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    return str(compiler)


@needs_compiler
def test_where_one_compiler_fails_the_next_does_it_and_the_first_is_not_asked_again(
    tmp_path: Path, recipe: Recipe
) -> None:
    recipe = dataclasses.replace(recipe, compilers=(failing(tmp_path, "odd"), *recipe.compilers))
    library = build(recipe, cache := tmp_path / "kept")
    assert ctypes.CDLL(str(library)).answer() == 42
    assert build(recipe, cache) == library
    assert (tmp_path / "calls").read_text().splitlines() == ["call"]


@needs_compiler
def test_a_compiler_that_does_not_run_is_passed_over(tmp_path: Path, recipe: Recipe) -> None:
    (odd := tmp_path / "odd").write_text("#!/no/such/interpreter\n")
    odd.chmod(0o755)
    library = build(dataclasses.replace(recipe, compilers=(str(odd), "cc")), tmp_path / "kept")
    assert ctypes.CDLL(str(library)).answer() == 42
    with pytest.raises(NativeBuildError, match=r"odd does not run: .*No such file"):
        build(dataclasses.replace(recipe, compilers=(str(odd),)), tmp_path / "other")


def test_where_all_compilers_fail_it_says_what_each_said_and_keeps_nothing(
    tmp_path: Path, recipe: Recipe
) -> None:
    compilers = failing(tmp_path, "odd"), failing(tmp_path, "old")
    with pytest.raises(NativeBuildError, match=r"odd failed: odd cannot; .*old failed: old cannot"):
        build(dataclasses.replace(recipe, compilers=compilers), cache := tmp_path / "kept")
    assert list(cache.iterdir()) == []


def test_the_cache_is_this_users_alone(caches: tuple[Path, Path]) -> None:
    folder = cache_folder()
    assert folder == caches[0] / "baton" / f"native-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == folder


@pytest.mark.parametrize("unsafe", ["writable by others", "a link", "a file"])
def test_a_cache_that_others_could_write_to_is_passed_over(
    caches: tuple[Path, Path], unsafe: str
) -> None:
    (folder := caches[0] / "baton").mkdir()
    folder /= f"native-{os.getuid()}"
    if unsafe == "a link":
        (caches[0] / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(caches[0] / "elsewhere")
    elif unsafe == "a file":
        folder.touch(mode=0o600)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    fallback = caches[1] / f"baton-native-{os.getuid()}"
    assert cache_folder() == fallback
    fallback.chmod(0o770)
    with pytest.raises(PermissionError, match="no folder to keep compiled code in"):
        cache_folder()


@needs_compiler
def test_a_cache_named_by_the_caller_is_checked_too(tmp_path: Path, recipe: Recipe) -> None:
    (cache := tmp_path / "open").mkdir()
    cache.chmod(0o777)
    with pytest.raises(NativeBuildError, match="this user alone may write"):
        build(recipe, cache)


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64's targets")
def test_of_what_was_built_ahead_the_nearest_that_the_cpu_can_run_is_taken(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, features = dataclasses.replace(recipe, targets=TARGETS), ""
    build_ahead(recipe, prebuilt := tmp_path / "prebuilt")
    monkeypatch.setattr(native_build, "cpu_features", lambda: features.split())
    monkeypatch.setenv("PATH", str(tmp_path))  # as in an image: no compiler
    for target in TARGETS:
        features = f"{target.needs} amx_tile"
        taken = build(recipe, tmp_path / "kept", prebuilt)
        assert taken.name.rpartition("-")[0] == f"answer-{target.name}"
    features = "cx16 lahf_lm sse4_1 sse4_2"
    lacks = "answer was built ahead for CPUs with popcnt, ssse3, which this one lacks; no compiler"
    with pytest.raises(NativeBuildError, match=lacks):
        build(recipe, tmp_path / "kept", prebuilt)
    recipe.sources[0].write_text("int answer(void) { return 6; }")
    with pytest.raises(NativeBuildError, match=r"^no compiler \(cc\)"):  # of these very sources
        build(recipe, tmp_path / "kept", prebuilt)
