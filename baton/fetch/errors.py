"""Why a checkpoint cannot be fetched.

FetchError              a person has to change something; names the field
├── NotThereError       the source has no such file
├── ForbiddenError      the source wants other credentials; or it has no such file and does not say
└── CutOffError         the source, or the way to it, failed: worth another try
"""

from __future__ import annotations

from baton.errors import BatonError

URI = "spec.model.uri"
CREDENTIALS = "spec.model.credentialsSecretName"
CACHE = "weights cache"


class FetchError(BatonError):
    def __init__(self, message: str, *, field: str = URI) -> None:
        super().__init__(message, field=field)

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class NotThereError(FetchError):
    pass


class ForbiddenError(FetchError):
    def __init__(self, message: str) -> None:
        super().__init__(message, field=CREDENTIALS)


class CutOffError(FetchError):
    pass


def of_status(status: int, where: str) -> FetchError:
    """The error of an HTTP status other than success for the file at `where`."""
    if status in (404, 410):
        return NotThereError(
            f"{where} is not there (HTTP {status}): the URI is the folder that holds config.json"
        )
    if status in (401, 403):
        return ForbiddenError(
            f"{where} may not be read (HTTP {status}): name a Secret whose keys are "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3, BEARER_TOKEN for https; some "
            "sources also answer so where there is no such file"
        )
    if status in (408, 425, 429) or status >= 500:
        return CutOffError(f"{where}: HTTP {status}")
    return FetchError(f"{where}: HTTP {status}")
