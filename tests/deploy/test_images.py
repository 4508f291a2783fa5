"""What the images are made from; none is built here, but in tests/k8s/test_built_images.py."""

from __future__ import annotations

import os
import pkgutil
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from deploy.api.generate import CHART, DEPLOY

ROOT = DEPLOY.parent
EXTRAS = {"worker": "pods", "router": "router,s3,traces", "controller": "controller"}
ROLES = tuple(EXTRAS)
_SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = _SETTINGS["project"]
PACKAGES = _SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def dockerfile(role: str) -> str:
    return (DEPLOY / "images" / f"{role}.Dockerfile").read_text()


@pytest.mark.parametrize("role", ROLES)
def test_an_image_is_built_in_one_stage_and_runs_as_nobody_in_another(role: str) -> None:
    text = dockerfile(role)
    of_ucx = ["nvidia/cuda:${CUDA}", "${BASE}", "${UCX}"] * (role == "worker")
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == [*of_ucx, *["${BASE}"] * 2]
    assert re.findall(r"^ARG BASE=python:\d+\.\d+-slim-\w+$", text, re.MULTILINE)
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE) == ["1000:1000"]
    assert f"'.[{EXTRAS[role]}]'" in text
    assert not re.search(r"(?i)token|password|secret", text)


def test_the_context_holds_each_package_of_the_wheel_and_little_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in kept)
    tops = {name.partition("/")[0] for name in kept}
    assert tops == {
        *PACKAGES,
        "LICENSE",
        "README.md",
        "pyproject.toml",
    }
    assert lines[1] == "*"


def test_an_image_has_no_compiler_and_each_recipe_is_built_ahead_in_one() -> None:
    built = set[str]()
    for role in ROLES:
        *_, build, final = dockerfile(role).split("\nFROM ")
        assert not re.search(r"g\+\+|gcc|clang|build-essential", final)
        built |= {pkgutil.resolve_name(name).name for name in re.findall(r"\S+:[A-Z_]+\b", build)}
    files = [path.read_text() for top in PACKAGES for path in (ROOT / top).rglob("*.py")]
    assert built == {name for text in files for name in re.findall(r'Recipe\(\s*"(\w+)"', text)}


def test_what_a_workers_pod_has_more_is_named_once() -> None:
    extras = PROJECT["optional-dependencies"]
    assert any(each.startswith("ray[default]") for each in extras["pods"])
    assert "baton-serve[worker,s3]" in extras["pods"]
    assert "ray[" not in dockerfile("worker")


def test_a_workers_own_ucx_has_cuda_and_rdma_and_is_that_of_the_wheel() -> None:
    """The preset gpu-rdma takes it: neither Debian's package nor the wheel has both."""
    text = dockerfile("worker")
    built = text.partition("FROM ${BASE}")[0]
    for option in ("--with-cuda", "--with-verbs", "--with-mlx5", "--with-rdmacm", "--enable-mt"):
        assert option in built
    assert "sha256sum --check --strict" in built
    (cuda,) = re.findall(r"^ARG CUDA=(\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"13\.0\.3-devel-\w+\.\d+@sha256:[0-9a-f]{64}", cuda)
    (version,) = re.findall(r"^ARG UCX_VERSION=(\S+)$", built, re.MULTILINE)
    assert f"libucx-cu12=={version}" in PROJECT["optional-dependencies"]["worker"]
    assert re.findall(r"^ARG UCX=(\S+)$", built, re.MULTILINE) == ["ucx-cuda"]
    final = text.rpartition("FROM ${BASE}")[2]
    assert "COPY --from=ucx /ucx/usr/local/lib/ /usr/local/lib/" in final
    assert final.index("COPY --from=ucx") < final.index("ldconfig")
    assert "libucx0" not in final
    preset = yaml.safe_load((CHART / "presets" / "gpu-rdma.yaml").read_text())
    assert preset["advanced"]["transfer"] == {"ucxLibrary": "system"}


def test_chart_and_images_are_of_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert chart["appVersion"] == PROJECT["version"]
    (ray,) = re.findall(r"^ARG RAY_VERSION=(\S+)$", dockerfile("worker"), re.MULTILINE)
    assert values["images"]["rayVersion"] == ray


def test_make_images_builds_all_three_with_the_engine_that_works(tmp_path: Path) -> None:
    said, programs = tmp_path / "said", _programs(tmp_path)
    (programs / "docker").write_text("#!/bin/sh\nexit 1\n")  # installed, its daemon is not
    (programs / "podman").write_text(f'#!/bin/sh\necho "$@" >> {said}\n')
    for name in ("docker", "podman"):
        (programs / name).chmod(0o755)
    done = _make_images(programs)
    assert done.returncode == 0, done.stderr
    version = PROJECT["version"]
    assert said.read_text().splitlines() == [
        "info",
        *(
            f"build --file deploy/images/{role}.Dockerfile --tag baton/{role}:{version} ."
            for role in ROLES
        ),
    ]


def test_make_images_says_so_where_there_is_no_engine(tmp_path: Path) -> None:
    done = _make_images(_programs(tmp_path))
    assert done.returncode != 0
    assert "none of docker podman buildah is here and works" in done.stderr


def _programs(folder: Path) -> Path:
    """A PATH with no engine on it."""
    programs = folder / "programs"
    programs.mkdir()
    for name in ("bash", "sh", "sed"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    return programs


def _make_images(programs: Path) -> subprocess.CompletedProcess[str]:
    make = shutil.which("make")
    assert make is not None
    environment = {"PATH": str(programs), "HOME": os.environ.get("HOME", "/")}
    command = [make, "--no-print-directory", "images"]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
