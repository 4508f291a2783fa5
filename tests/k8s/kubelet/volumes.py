"""A pod's volumes as folders of this machine, and where a container has them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.k8s.kubelet.entry import VolumeMount
from tests.k8s.kubelet.environment import PodFacts, Values, selected
from tests.k8s.kubelet.errors import ContainerError

ServiceToken = Callable[[str, Mapping[str, Any]], str]
"""A token of the service account of that name, as a `serviceAccountToken` source asks for it."""


class Volumes:
    """Own a pod's volumes. They are removed with the folders that they lie in."""

    def __init__(self, facts: PodFacts, folder: Path, memory: Path, shared: Path) -> None:
        """`folder`: the pod's own; `memory`: in memory; `shared`: of all pods, for what outlives
        one: claims, and what pods make on their nodes."""
        self._facts = facts
        self._folder, self._memory, self._shared = folder, memory, shared
        self._paths: dict[str, Path] = {}

    def make(self, values: Values, token: ServiceToken) -> None:
        """Raises ContainerError; once more then: what was made stays as it is."""
        spec = self._facts.pod["spec"]
        group = (spec.get("securityContext") or {}).get("fsGroup")
        for volume in spec.get("volumes") or ():
            if volume["name"] not in self._paths:
                self._paths[volume["name"]] = self._make(volume, values, token, group)

    def mounts_of(self, container: Mapping[str, Any]) -> tuple[VolumeMount, ...]:
        """Raises ContainerError."""
        result = []
        for mount in container.get("volumeMounts") or ():
            if mount["name"] not in self._paths:
                raise ContainerError(f"there is no volume {mount['name']}")
            source, read_only = str(self._paths[mount["name"]]), bool(mount.get("readOnly"))
            result.append(VolumeMount(source, mount["mountPath"], read_only))
        return tuple(result)

    def _make(
        self, volume: Mapping[str, Any], values: Values, token: ServiceToken, group: int | None
    ) -> Path:
        if (host := volume.get("hostPath")) is not None:
            return self._host_path(host)
        if (claim := volume.get("persistentVolumeClaim")) is not None:
            return claim_folder(self._shared, claim["claimName"])
        if (empty := volume.get("emptyDir")) is not None:
            parent = self._memory if empty.get("medium") == "Memory" else self._folder
            return _made(parent / volume["name"], 0o777, group)
        files = self._files(volume, values, token)  # may raise, and be tried again
        path = _made(self._folder / volume["name"], 0o755, group)
        _write(path, files)
        return path

    def refresh(self, values: Values) -> None:
        """Write what ConfigMaps say by now: a mounted folder shows it."""
        for volume in self._facts.pod["spec"].get("volumes") or ():
            if (source := volume.get("configMap")) and volume["name"] in self._paths:
                texts = selected(source.get("items"), values("ConfigMap", source["name"]) or {})
                _write(self._paths[volume["name"]], texts)

    def _host_path(self, source: Mapping[str, Any]) -> Path:
        """This machine's, or a folder of the pod's node, which this machine gets to see nothing
        of."""
        path = Path(source["path"])
        if path.exists():
            return path
        if source.get("type") != "DirectoryOrCreate":
            raise ContainerError(f"hostPath {path} is not there")
        made = self._shared / self._facts.field("spec.nodeName") / path.relative_to("/")
        made.mkdir(parents=True, exist_ok=True)
        return made

    def _files(
        self, volume: Mapping[str, Any], values: Values, token: ServiceToken
    ) -> dict[str, str]:
        """Of a volume, or of a source of a projected one, that is made of texts."""
        for name, kind, names in (
            ("configMap", "ConfigMap", "name"),
            ("secret", "Secret", "secretName"),
        ):
            if (source := volume.get(name)) is not None:
                called = source.get(names) or source.get("name")
                texts = values(kind, called)
                if texts is None and not source.get("optional"):
                    raise ContainerError(f"there is no {kind} {called}")
                return selected(source.get("items"), texts or {})
        if (source := volume.get("downwardAPI")) is not None:
            items = source.get("items") or ()
            return {i["path"]: self._facts.field(i["fieldRef"]["fieldPath"]) for i in items}
        if (source := volume.get("serviceAccountToken")) is not None:
            account = self._facts.field("spec.serviceAccountName")
            return {source["path"]: token(account, source)}
        if (projected := volume.get("projected")) is not None:
            files: dict[str, str] = {}
            for source in projected.get("sources") or ():
                files |= self._files(source, values, token)
            return files
        raise ContainerError(f"volume {volume}: this kubelet does not know it")


def claim_folder(shared: Path, name: str) -> Path:
    """Of a PersistentVolumeClaim; made, where it is not there yet."""
    path = shared / "claims" / name
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o777)
    return path


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o644)


def _made(path: Path, mode: int, group: int | None) -> Path:
    path.mkdir(parents=True)
    path.chmod(mode)
    if group is not None:
        os.chown(path, 0, group)
    return path
