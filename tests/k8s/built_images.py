"""The images, built from their recipes by buildah, which needs no container engine.

1. debootstrap makes the base: Debian with its Python, and pip's settings of this machine.
2. buildah runs each recipe's steps in a chroot. CUDA's base is not at hand: the worker has the
   wheel's UCX.
3. Each becomes a folder, from which the kubelet makes containers.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.k8s.kubelet.errors import NotPossibleError
from tests.k8s.kubelet.machine import REPOSITORY, Image

ROLES = ("worker", "router", "controller")
_MIRROR, _SUITE = "http://deb.debian.org/debian", "bookworm"
_PACKAGES = "python3-venv,python-is-python3,ca-certificates"
_IMPORT = "FROM scratch\nADD base.tar /\n"


def check_can_build() -> None:
    """Raises NotPossibleError, which says what is missing."""
    if os.geteuid() != 0:
        raise NotPossibleError("images are built by root")
    if missing := [name for name in ("debootstrap", "buildah") if shutil.which(name) is None]:
        raise NotPossibleError(f"not on PATH: {', '.join(missing)}")
    try:
        urllib.request.urlopen(f"{_MIRROR}/dists/{_SUITE}/InRelease", timeout=10).close()
    except OSError as error:
        raise NotPossibleError(f"no Debian mirror is reached: {error}") from error


def build_images(folder: Path, version: str) -> dict[str, Image]:
    """By the names that the chart has for them."""
    volumes = _make_base(folder)
    return {f"baton/{role}:{version}": _build(folder, role, volumes) for role in ROLES}


def _make_base(folder: Path) -> list[str]:
    """Returns options by which a build sees the files that pip's settings name."""
    tree = folder / "base"
    _run("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, str(tree), _MIRROR)
    listed = _run(sys.executable, "-m", "pip", "config", "list").splitlines()
    settings = {name: ast.literal_eval(said) for name, said in (li.split("=", 1) for li in listed)}
    lines = {f"{name.rpartition('.')[2]} = {said}\n" for name, said in settings.items()}
    (tree / "etc" / "pip.conf").write_text("[global]\n" + "".join(sorted(lines)))
    _run("tar", "-C", str(tree), "-cf", str(folder / "base.tar"), ".")
    (folder / "base.Dockerfile").write_text(_IMPORT)
    _buildah(folder, "build", "-f", str(folder / "base.Dockerfile"), "-t", "base", str(folder))
    words = {word.removeprefix("file://") for said in settings.values() for word in said.split()}
    return [
        f"--volume={word}:{word}:ro" for word in words if word[0] == "/" and Path(word).exists()
    ]


def _build(folder: Path, role: str, volumes: list[str]) -> Image:
    root = folder / role
    arguments = ["--build-arg=BASE=localhost/base", "--build-arg=UCX=ucx-none", *volumes]
    recipe = f"deploy/images/{role}.Dockerfile"
    _buildah(folder, "build", *arguments, f"--output={root}", "-f", recipe, "-t", role, ".")
    said = json.loads(_buildah(folder, "inspect", "--type=image", f"localhost/{role}"))
    config = said["OCIv1"]["config"]
    assert config["User"] == "1000:1000"
    command = (*config.get("Entrypoint", ()), *config.get("Cmd", ()))
    return Image(root, dict(each.split("=", 1) for each in config["Env"]), command=command)


def _buildah(folder: Path, verb: str, *arguments: str) -> str:
    """In a mount namespace of its own, so that nothing stays mounted."""
    store = ("--root", str(folder / "store"), "--runroot", str(folder / "run"))
    isolation = ("--isolation=chroot",) if verb == "build" else ()
    return _run("unshare", "--mount", "buildah", *store, verb, *isolation, *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout
