"""Where a model's files come from."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.api.checked import Checked, Rule, bounded

MODEL_MOUNT = "/models"
"""Where a claim's files lie in every pod."""


@dataclass(frozen=True)
class ClaimSource(Checked):
    """A folder of a PersistentVolumeClaim, which every worker mounts read-only."""

    claim_name: str = bounded(max_size=253)
    path: str | None = bounded(None, max_size=1024, pattern=r"^[^/.][^/]*(/[^/.][^/]*)*$")
    """The model's folder in it, relative; None: the claim's root."""


@dataclass(frozen=True)
class ModelSource(Checked):
    """Exactly one of `name`, `claim` and `uri`."""

    name: str | None = bounded(None, max_size=1024)
    """A name on the Hugging Face hub, or a folder that the worker's image holds."""
    claim: ClaimSource | None = None
    uri: str | None = bounded(None, max_size=2048, pattern=r"^(s3|https)://[^/]+/.+$")
    """An s3:// or https:// folder; fetched once to each node's weights cache."""
    revision: str | None = bounded(None, max_size=256)
    """Of a model on the hub: a branch, tag or commit. Not built yet: must not be given."""

    rules = (
        Rule(
            "[has(self.name), has(self.claim), has(self.uri)].exists_one(given, given)",
            "name must be given, or claim or uri: exactly one of them",
            lambda model: sum(x is not None for x in (model.name, model.claim, model.uri)) == 1,
        ),
        Rule(
            "!has(self.revision)",
            "revision is not built yet: the hub's main branch is served",
            lambda model: model.revision is None,
        ),
    )
