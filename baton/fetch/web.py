"""A folder on an https server."""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import re
import ssl
from collections.abc import Iterator
from email.message import Message
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from baton.fetch.errors import CutOffError, FetchError, of_status
from baton.fetch.source import CHUNK_BYTES, TIMEOUT_S, Content


class WebSource:
    """`folder`: its URL; `token`: sent to this server alone, not to where it redirects."""

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
        raise of_status(error.code, where) from error
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
            raise CutOffError(f"{where}: an answer with a part of it does not say which")
        start, size = map(int, found.groups())
    elif (told := headers.get("Content-Length")) is not None:
        size = int(told)
    return Content(_chunks(response, where), start, size, _version(headers), _sha256(headers))


def _chunks(response: http.client.HTTPResponse, where: str) -> Iterator[bytes]:
    try:
        while chunk := response.read(CHUNK_BYTES):
            yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise CutOffError(f"{where}: {error or type(error).__name__}") from error


def _version(headers: Message) -> str | None:
    """As If-Range takes it: a weak ETag says too little."""
    etag: str | None = headers.get("ETag")
    return headers.get("Last-Modified") if etag is None or etag.startswith("W/") else etag


def _sha256(headers: Message) -> str | None:
    """What RFC 9530 or a bucket's own header says of the whole file."""
    found = re.search(r"sha-256=:([^:]+):", headers.get("Repr-Digest", ""))
    told = found.group(1) if found else headers.get("x-amz-checksum-sha256", "")
    return whole_sha256(told)


def whole_sha256(told: str) -> str | None:
    """A base64 digest in hexadecimal digits; None for none, and for one that is made of parts."""
    try:
        digest = base64.b64decode(told, validate=True)
    except binascii.Error:
        return None
    return digest.hex() if len(digest) == 32 else None
