"""An API server for tests: what there is stays as it was, and what is written is noted."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

from tests.deploy.controller.scripted_api import Exchange
from tests.identities import ROOT

NAMESPACE = "models"


def name_of(obj: dict[str, Any]) -> str:
    return str(obj["metadata"]["name"])


@dataclass
class Server:
    """What there is, by plural."""

    objects: dict[str, list[dict[str, Any]]]
    refuses: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    """By verb and what `_named` calls it: a status and its reason."""
    forgets: frozenset[str] = frozenset()
    """What lists lack, by what `_named` calls them."""
    secret: dict[str, bytes] = field(default_factory=lambda: {"root": ROOT})
    """What each Secret holds, whatever is written."""
    writes: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    """Refused ones, too."""

    def __call__(self, exchange: Exchange) -> None:
        path = exchange.path.partition("?")[0]
        *_, before, last = path.split("/")
        if exchange.is_watch:
            exchange.begin_stream()
            exchange.hang()
            return
        if exchange.command != "GET":
            self.writes.append((exchange.command, path, json.loads(exchange.body)))
        if refusal := self.refuses.get((exchange.command, _named(path))):
            code, reason = refusal
            exchange.answer({"kind": "Status", "code": code, "reason": reason}, code)
        elif exchange.command == "GET" and path == "/version":
            exchange.answer({"major": "1", "minor": "31"})
        elif exchange.command == "GET" and before == "secrets":
            data = {name: base64.b64encode(it).decode() for name, it in self.secret.items()}
            exchange.answer({"data": data})
        elif exchange.command == "GET":
            said = {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}
            items = [] if _named(path) in self.forgets else self.objects.get(last, [])
            exchange.answer(said | {"items": items, "resources": []})
        else:
            _, _, body = self.writes[-1]
            named = (obj for obj in self.objects.get(before, ()) if name_of(obj) == last)
            found = next(named, {"metadata": {"namespace": NAMESPACE, "uid": "uid-3"}})
            merged = {
                part: found.get(part, {}) | body.get(part, {}) for part in ("metadata", "spec")
            }
            exchange.answer(found | body | merged)

    def written(self, plural: str) -> list[dict[str, Any]]:
        return [body for _, path, body in self.writes if plural in path.split("/")]


def _named(path: str) -> str:
    """The path's last part; `listed` before it where it is the list of one namespace."""
    *_, before, namespace, last = ("", "", *path.split("/"))
    return f"listed {last}" if before == "namespaces" and namespace == NAMESPACE else last
