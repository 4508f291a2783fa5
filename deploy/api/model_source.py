"""Where a model's files come from."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.api.checked import Checked, Rule, bounded
from deploy.api.naming import OBJECT_NAME

CLAIMS_FOLDER = "/claims"
"""Where claims lie in every pod, each in a folder of its name."""
SOURCE = 2048
"""Characters of a source at most: a model is called by the last part of its own."""


@dataclass(frozen=True)
class ClaimSource(Checked):
    """A folder of a PersistentVolumeClaim, which every worker mounts read-only."""

    claim_name: str = bounded(max_size=253, pattern=OBJECT_NAME)
    path: str | None = bounded(None, max_size=1024, pattern=r"^[^/.][^/]*(/[^/.][^/]*)*$")
    """The model's folder in it, relative; None: the claim's root."""

    @property
    def folder(self) -> str:
        """Where the claim lies in every pod."""
        return f"{CLAIMS_FOLDER}/{self.claim_name}"


@dataclass(frozen=True)
class ModelSource(Checked):
    """Exactly one of `name`, `claim` and `uri`."""

    name: str | None = bounded(None, max_size=1024, pattern=r"^\S")
    """A name on the Hugging Face hub, or a folder that the worker's image holds."""
    claim: ClaimSource | None = None
    uri: str | None = bounded(None, max_size=SOURCE, pattern=r"^(s3|https)://[^/?#@]+/[^?#]+$")
    """An s3:// or https:// folder that holds config.json, or a tar file of one; fetched once to
    each node's weights cache. What is there is taken to stay: another version, another URI."""
    credentials_secret_name: str | None = bounded(None, max_size=253, pattern=OBJECT_NAME)
    """For `uri`: a Secret whose keys are environment variables: AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and what else boto3 reads, BEARER_TOKEN for https."""
    revision: str | None = bounded(None, max_size=256, pattern=r"^[^/\s][^\s]*$")
    """Of a model on the hub: a branch, tag or commit; None: its main branch."""

    rules = (
        Rule(
            "[has(self.name), has(self.claim), has(self.uri)].exists_one(given, given)",
            "name must be given, or claim or uri: exactly one of them",
            lambda model: sum(x is not None for x in (model.name, model.claim, model.uri)) == 1,
        ),
        Rule(
            "!has(self.revision) || has(self.name)",
            "revision is of a model on the hub: it must not be given without name",
            lambda model: model.revision is None or model.name is not None,
        ),
        Rule(
            "!has(self.credentialsSecretName) || has(self.uri)",
            "credentialsSecretName is for uri: it must not be given without",
            lambda model: model.credentials_secret_name is None or model.uri is not None,
        ),
    )


@dataclass(frozen=True)
class HubSettings(Checked):
    """The Hugging Face hub, for all pods that read a model or a tokenizer."""

    offline: bool = False
    """Never asked: models and tokenizers that are named are in the weights cache."""
    endpoint: str | None = bounded(None, max_size=2048, pattern=r"^https?://[^/?#@]+(/[^?#]*)?$")
    """A mirror instead of https://huggingface.co."""
    token_secret_name: str | None = bounded(None, max_size=253, pattern=OBJECT_NAME)
    """A Secret whose key `token` opens private models."""
