"""Packages and sources from the Debian archive that this machine already uses.

apt uses folders of its own, so it needs no root and changes nothing of the machine's apt. Packages
are unpacked, not installed.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.k8s.control_plane.errors import BuildError
from tests.k8s.control_plane.steps import Steps

RELEASE = "bookworm"
_APT = Path("/etc/apt")
_ONE_LINE = re.compile(r"deb\s+(?:\[[^]]*\]\s*)?\S+\s+(?P<suite>\S+)\s+(?P<components>.*)")


class Archive:
    """Own a private apt folder that knows RELEASE's main component, sources included."""

    def __init__(self, folder: Path, steps: Steps, apt: Path = _APT) -> None:
        """Raises BuildError when the machine's sources do not name the release."""
        self._folder = folder
        self._steps = steps
        parts = folder / "sources"
        for place in (
            parts,
            folder / "lists" / "partial",
            folder / "cache" / "archives" / "partial",
        ):
            place.mkdir(parents=True)
        named = [
            _write(parts / source.name, _with_sources(source))
            for source in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*")))
            if source.is_file()
        ]
        if not any(named):
            raise BuildError(f"apt's sources on this machine do not name Debian {RELEASE}, main")
        self._apt_get = (
            "apt-get", "--quiet",
            "-o", "Dir::Etc::SourceList=/dev/null",
            "-o", f"Dir::Etc::SourceParts={parts}",
            "-o", f"Dir::State::Lists={folder / 'lists'}",
            "-o", "Dir::State::Status=/dev/null",  # what is installed here is no candidate
            "-o", f"Dir::Cache={folder / 'cache'}",
            "-o", "APT::Sandbox::User=",  # no other user may write to these folders
            "-o", "Acquire::Languages=none",
            "-o", "Acquire::Retries=3",
        )  # fmt: skip

    def update(self) -> None:
        self._steps.run("reading Debian's package lists", (*self._apt_get, "update"), self._folder)

    def unpack(self, packages: tuple[str, ...], root: Path) -> tuple[str, ...]:
        """Unpack binary packages below `root`; returns their file names, versions in them."""
        debs = self._folder / "debs"
        debs.mkdir()
        what = f"fetching {', '.join(packages)}"
        self._steps.run(what, (*self._apt_get, "download", *packages), debs)
        found = sorted(debs.glob("*.deb"))
        for deb in found:
            command = ("dpkg-deb", "--extract", deb, root)
            self._steps.run(f"unpacking {deb.name}", command, debs)
        return tuple(deb.name for deb in found)

    def unpack_source(self, package: str, target: Path) -> str:
        """Unpack a source package, Debian's patches applied, as `target`; its .dsc's name."""
        fetch = (*self._apt_get, "source", "--download-only", package)
        self._steps.run(f"fetching the source of {package}", fetch, self._folder)
        (dsc,) = self._folder.glob("*.dsc")
        target.parent.mkdir(parents=True, exist_ok=True)
        command = ("dpkg-source", "--extract", dsc, target)
        self._steps.run(f"unpacking {dsc.name}", command, self._folder)
        return dsc.name


def _write(path: Path, text: str) -> bool:
    if text:
        path.write_text(text)
    return bool(text)


def _with_sources(source: Path) -> str:
    """The entries of the release's main component, each for packages and for their sources."""
    text = source.read_text()
    if source.suffix == ".sources":
        return "\n\n".join(filter(None, map(_stanza, re.split(r"\n\s*\n", text))))
    if source.suffix == ".list":
        return "".join(
            f"{line}\n{line.replace('deb', 'deb-src', 1)}\n"
            for line in map(str.strip, text.splitlines())
            if (entry := _ONE_LINE.fullmatch(line)) is not None
            and _is_wanted([entry["suite"]], entry["components"].split())
        )
    return ""


def _stanza(text: str) -> str:
    """A stanza of the deb822 format with both types, or "" when it is not wanted."""
    fields = dict(re.findall(r"^([\w-]+):[ \t]*(.*)$", text, re.MULTILINE))
    suites, components = fields.get("Suites", "").split(), fields.get("Components", "").split()
    is_for_packages = "deb" in fields.get("Types", "").split()
    if not is_for_packages or fields.get("Enabled") == "no" or not _is_wanted(suites, components):
        return ""
    return re.sub(r"^Types:.*$", "Types: deb deb-src", text, flags=re.MULTILINE)


def _is_wanted(suites: list[str], components: list[str]) -> bool:
    names_release = any(suite == RELEASE or suite.startswith(f"{RELEASE}-") for suite in suites)
    return names_release and "main" in components
