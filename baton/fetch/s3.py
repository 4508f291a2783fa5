"""A folder of an S3 bucket, or of what speaks like one; credentials as boto3 finds them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from baton.fetch.errors import CutOffError, FetchError, ForbiddenError, of_status
from baton.fetch.source import CHUNK_BYTES, TIMEOUT_S, Content
from baton.fetch.web import whole_sha256


class S3Source:
    """Raises FetchError where boto3 is missing or its configuration is wrong."""

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
            with _told(self.where("")):
                keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
        except ForbiddenError:  # reading may be allowed where listing is not
            return None
        return frozenset(key.removeprefix(prefix) for key in keys)

    @contextlib.contextmanager
    def read(self, name: str, start: int = 0, version: str | None = None) -> Iterator[Content]:
        where, wanted = self.where(name), {"Bucket": self._bucket, "Key": self._key(name)}
        with _told(where):
            answer, start = self._get(wanted, start, version)
        with contextlib.closing(answer["Body"]) as body:
            yield Content(
                _chunks(body, where),
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
def _told(where: str) -> Iterator[None]:
    """boto3's errors as ours."""
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

    try:
        yield
    except ClientError as error:
        raise of_status(_status(error), where) from error
    except HTTPClientError as error:
        raise CutOffError(f"{where}: {error}") from error
    except BotoCoreError as error:
        raise FetchError(f"{where}: {error}") from error


def _chunks(body: Any, where: str) -> Iterator[bytes]:
    from botocore.exceptions import BotoCoreError
    from urllib3.exceptions import HTTPError

    try:
        yield from body.iter_chunks(CHUNK_BYTES)
    except (BotoCoreError, HTTPError, OSError) as error:
        raise CutOffError(f"{where}: {error}") from error


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
