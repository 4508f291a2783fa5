"""Where a checkpoint lies: a folder on an https server, or of a bucket in S3. Why it cannot be
fetched:

FetchError              a person has to change something; names the field
├── NotThereError       the source has no such file
├── ForbiddenError      the source wants other credentials; or it has no such file and does not say
└── CutOffError         the source, or the way to it, failed: worth another try
    └── DamagedError    all came, and does not match the source's checksum: none of it may be kept
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import re
import ssl
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from email.message import Message
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from baton.errors import BatonError

TIMEOUT_S = 60.0
"""A connection on which nothing comes for this long is cut off."""
CHUNK_BYTES = 1 << 20


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


class DamagedError(CutOffError):
    pass


def _of_status(status: int, where: str) -> FetchError:
    """Make the error of an HTTP status other than success for the file at `where`."""
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


# --- a source -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Content:
    """A file on its way."""

    chunks: Iterator[bytes]
    """The file's bytes. Reading them raises CutOffError; they may also end early."""
    start: int
    """How many bytes at the file's start are left out."""
    size: int | None
    """Bytes of the whole file. None: the source does not say, and ends only after the last byte."""
    version: str | None
    """The version to continue with. None: the source does not distinguish versions."""
    sha256: str | None = None
    """SHA-256 of the whole file in hexadecimal digits, if the source has it."""


class Source(Protocol):
    """A folder's files, by name."""

    def where(self, name: str) -> str:
        """Name a file in messages, without secrets."""

    def names(self) -> frozenset[str] | None:
        """List the names of all files; None: the source cannot be listed. Raises FetchError."""

    def read(
        self, name: str, start: int = 0, version: str | None = None
    ) -> AbstractContextManager[Content]:
        """Read a file from byte `start` on if it is still this `version`, else from its beginning.

        Raises NotThereError, ForbiddenError, CutOffError, FetchError.
        """


# --- https ----------------------------------------------------------------------------------------


class WebSource:
    """A folder on a web server. `folder` is its URL; `token` is sent to this server, and never to
    one that it redirects to."""

    def __init__(self, folder: str, token: str | None = None) -> None:
        self._folder = folder.rstrip("/")
        self._token = token

    def where(self, name: str) -> str:
        return f"{self._folder}/{quote(name)}"

    def names(self) -> None:
        return None

    @contextlib.contextmanager
    def read(self, name: str, start: int = 0, version: str | None = None) -> Iterator[Content]:
        where = self.where(name)
        request = Request(where, headers={"Accept-Encoding": "identity", "User-Agent": "baton"})
        if self._token is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        if start and version is not None:
            request.add_header("Range", f"bytes={start}-")
            request.add_header("If-Range", version)
        with contextlib.closing(_opened(request, where)) as response:
            yield _content(response, where)


def _opened(request: Request, where: str) -> http.client.HTTPResponse:
    try:
        response: http.client.HTTPResponse = urlopen(request, timeout=TIMEOUT_S)
    except HTTPError as error:
        error.close()
        if error.code == 416 and request.has_header("Range"):  # it has become shorter
            request.remove_header("Range")
            return _opened(request, where)
        raise _of_status(error.code, where) from error
    except URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise FetchError(
                f"{where}: {error.reason.verify_message}: mount the authority's certificates and "
                "name their file in SSL_CERT_FILE"
            ) from error
        raise CutOffError(f"{where}: {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise CutOffError(f"{where}: {error or type(error).__name__}") from error
    return response


def _content(response: http.client.HTTPResponse, where: str) -> Content:
    headers, start, size = response.headers, 0, None
    if response.status == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", headers.get("Content-Range", ""))
        if found is None:
            raise CutOffError(f"{where}: a partial file came without a Content-Range header")
        start, size = map(int, found.groups())
    elif (length := headers.get("Content-Length")) is not None:
        size = int(length)
    return Content(_chunks(response, where), start, size, _version(headers), _sha256(headers))


def _chunks(response: http.client.HTTPResponse, where: str) -> Iterator[bytes]:
    try:
        while chunk := response.read(CHUNK_BYTES):
            yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise CutOffError(f"{where}: {error or type(error).__name__}") from error


def _version(headers: Message) -> str | None:
    """Return a version for If-Range, which takes no weak ETag."""
    etag: str | None = headers.get("ETag")
    return headers.get("Last-Modified") if etag is None or etag.startswith("W/") else etag


def _sha256(headers: Message) -> str | None:
    """Return the whole file's digest, from RFC 9530's header or a bucket's own."""
    found = re.search(r"sha-256=:([^:]+):", headers.get("Repr-Digest", ""))
    digest = found.group(1) if found else headers.get("x-amz-checksum-sha256", "")
    return whole_sha256(digest)


def whole_sha256(encoded: str) -> str | None:
    """Write a base64 digest in hexadecimal digits. None for an empty one, and for one made of
    parts."""
    try:
        digest = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        return None
    return digest.hex() if len(digest) == 32 else None


# --- S3 -------------------------------------------------------------------------------------------


class S3Source:
    """A folder of a bucket. Making it raises FetchError where boto3 is missing or its configuration
    is wrong."""

    def __init__(self, bucket: str, folder: str) -> None:
        try:
            import boto3
            from botocore import UNSIGNED
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError as error:
            raise FetchError("s3 needs boto3: pip install 'baton-serve[s3]'") from error
        self._bucket, self._folder = bucket, folder.strip("/")
        try:
            session = boto3.Session()
            # Without credentials, what everybody may read.
            unsigned = {} if session.get_credentials() else {"signature_version": UNSIGNED}
            config = Config(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, **unsigned)
            self._client: Any = session.client("s3", config=config)
        except (BotoCoreError, ValueError) as error:
            raise FetchError(f"s3://{bucket}: {error}") from error

    def where(self, name: str) -> str:
        return f"s3://{self._bucket}/{self._key(name)}"

    def names(self) -> frozenset[str] | None:
        prefix = self._key("")
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=prefix, Delimiter="/"
        )
        try:
            with _translated(self.where("")):
                keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
        except ForbiddenError:  # reading may be allowed where listing is not
            return None
        return frozenset(key.removeprefix(prefix) for key in keys)

    @contextlib.contextmanager
    def read(self, name: str, start: int = 0, version: str | None = None) -> Iterator[Content]:
        where, wanted = self.where(name), {"Bucket": self._bucket, "Key": self._key(name)}
        with _translated(where):
            answer, start = self._get(wanted, start, version)
        with contextlib.closing(answer["Body"]) as body:
            yield Content(
                _body_chunks(body, where),
                start,
                start + answer["ContentLength"],
                answer.get("ETag"),
                whole_sha256(answer.get("ChecksumSHA256", "")),
            )

    def _get(self, wanted: dict[str, str], start: int, version: str | None) -> tuple[Any, int]:
        from botocore.exceptions import ClientError

        if start and version is not None:
            try:
                part = {"Range": f"bytes={start}-", "IfMatch": version}
                return self._client.get_object(**wanted, **part), start
            except ClientError as error:
                if _status(error) not in (412, 416):  # it is another one now
                    raise
        return self._client.get_object(**wanted), 0

    def _key(self, name: str) -> str:
        return f"{self._folder}/{name}".lstrip("/")


@contextlib.contextmanager
def _translated(where: str) -> Iterator[None]:
    """Raise boto3's errors as Baton's, those of a body on its way included."""
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        FlexibleChecksumError,
        HTTPClientError,
        IncompleteReadError,
    )
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ClientError as error:
        raise _of_status(_status(error), where) from error
    except (HTTPClientError, IncompleteReadError, HTTPError, OSError) as error:
        raise CutOffError(f"{where}: {error}") from error
    except FlexibleChecksumError as error:
        raise DamagedError(f"{where}: {error}") from error
    except BotoCoreError as error:
        raise FetchError(f"{where}: {error}") from error


def _body_chunks(body: Any, where: str) -> Iterator[bytes]:
    with _translated(where):
        yield from body.iter_chunks(CHUNK_BYTES)


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
